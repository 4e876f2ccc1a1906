"""A packing to look at: its numbers, and pages that need nothing but a browser. NumPy and Arrow, no torch.

packing, folder   a packed folder or a plan, opened       summary, histogram, rank_work   its numbers
sample            the rows that a page draws              inspect_page, audit_page        the pages
embed             one file, safe to open                  page/                           markup, style and scripts
terminal          the numbers as text
"""

from neatpack.report.audit_page import audit_page as audit_page
from neatpack.report.embed import write_page as write_page
from neatpack.report.inspect_page import inspect_page as inspect_page
from neatpack.report.packing import Packing as Packing
from neatpack.report.packing import open_packing as open_packing
from neatpack.report.summary import Summary as Summary
from neatpack.report.summary import summarise as summarise

__all__ = ["Packing", "Summary", "audit_page", "inspect_page", "open_packing", "summarise", "write_page"]
