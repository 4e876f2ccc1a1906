"""The audit: is it true of this model, measured?"""

from neatpack.audit.model_audit import ModelAudit as ModelAudit
from neatpack.audit.model_audit import audit_model as audit_model

__all__ = ["ModelAudit", "audit_model"]
