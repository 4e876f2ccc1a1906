"""TRL `RewardTrainer` on packed preference pairs, unchanged: the collator packs, the model pools by document.

A padded batch spends a row on each answer, filled up to the longest. Here the pairs of a batch share rows: `pack_groups`
keeps a pair in one row, side by side; `PackedCollator` sends the boundaries and each document's pair number; and the model
returns the reward of each document's own last token, chosen first, as `RewardTrainer` expects it. Three things to know:

- the stock classification head would take the last token of each *row*: one reward for several documents;
- `RewardTrainer` counts tokens by `attention_mask`, so there is one, for counting: the model's forward keeps it to itself;
- TRL's `DPOTrainer` sums log-probabilities over rows inside a private method; see dpo.py for a packed DPO step.

    python examples/trl_reward.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from ingredients import byte_tokenizer, library_pairs, small_llama_config
from transformers import LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

import neatpack.hf
from neatpack.data.groups import pack_groups
from neatpack.train import pool_documents, split_pairs


def collate_pairs(pairs: list[dict[str, list[int]]]) -> dict[str, Any]:
    """The pairs of one batch in as few rows of 1024 tokens as they fit in."""
    rows = pack_groups([(pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs], capacity=1024)
    batch = neatpack.PackedCollator(document_columns=["group_ids"], return_params=True)(rows)
    del batch["labels"]  # a language model's
    return {**batch, "attention_mask": (batch["packed_seq_params"].doc_ids != 0).long()}


class PackedRewardModel(LlamaForSequenceClassification):
    """A reward a document; without pair numbers, a score a token, which is what the probe looks at."""

    def forward(
        self,
        input_ids: torch.Tensor,
        packed_seq_params: neatpack.PackedSeqParams | None = None,
        group_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **boundaries: Any,
    ) -> SequenceClassifierOutput:
        """Documents' rewards `[2 * num_pairs, 1]`: the chosen ones, then the rejected ones."""
        scores = self.score(self.model(input_ids, **boundaries).last_hidden_state)  # [B, S, 1]
        if packed_seq_params is None or group_ids is None:
            return SequenceClassifierOutput(logits=scores)
        rewards = pool_documents(scores, packed_seq_params, "last")
        return SequenceClassifierOutput(logits=torch.cat(split_pairs(rewards, group_ids, packed_seq_params)))


def make_model(kind: type[LlamaForSequenceClassification] = PackedRewardModel) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return kind(small_llama_config(num_labels=1, pad_token_id=257, attn_implementation=neatpack.hf.register()))


def make_trainer(folder: str, model: torch.nn.Module, data_collator: Any = collate_pairs) -> RewardTrainer:
    options = {"max_steps": 16, "learning_rate": 5e-3, "max_length": 512, "logging_steps": 4, "save_strategy": "no"}
    args = RewardConfig(
        folder, **options, per_device_train_batch_size=6, bf16=False, use_cpu=True, report_to=[], disable_tqdm=True
    )
    pairs = Dataset.from_list(library_pairs(longest=300)[:24])
    return RewardTrainer(
        model=model, args=args, train_dataset=pairs, processing_class=byte_tokenizer(), data_collator=data_collator
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, make_model())
        batch = next(iter(trainer.get_train_dataloader()))
        scored = {name: value for name, value in batch.items() if name not in ("group_ids", "attention_mask")}
        report = neatpack.check_isolation(trainer.model, scored)
        print(report)
        report.raise_if_leaking()

        padded = make_trainer(folder, make_model(LlamaForSequenceClassification), DataCollatorForPreference(pad_token_id=257))
        for name, one in (("packed", trainer), ("padded", padded)):
            batch = next(iter(one.get_train_dataloader()))
            loss = one.compute_loss(one.model, batch).item()
            print(f"first batch {name}: {batch['input_ids'].numel()} slots, loss {loss:.6f}")

        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {history[0]['loss']:.3f} -> {history[-1]['loss']:.3f}, accuracy {history[-1]['accuracy']:.2f}")


if __name__ == "__main__":
    main()
