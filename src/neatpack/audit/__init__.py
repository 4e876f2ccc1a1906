"""The audit: is it true of this model, of this data, of every model there is, measured?"""

from neatpack.audit.data import DataAudit as DataAudit
from neatpack.audit.data import Finding as Finding
from neatpack.audit.data import audit_data as audit_data
from neatpack.audit.data import is_packed_folder as is_packed_folder
from neatpack.audit.influence import InfluenceMap as InfluenceMap
from neatpack.audit.influence import influence_map as influence_map
from neatpack.audit.influence import influence_without_boundaries as influence_without_boundaries
from neatpack.audit.model_audit import ModelAudit as ModelAudit
from neatpack.audit.model_audit import audit_model as audit_model
from neatpack.audit.zoo import Zoo as Zoo
from neatpack.audit.zoo import audit_zoo as audit_zoo

__all__ = [
    "DataAudit",
    "Finding",
    "InfluenceMap",
    "ModelAudit",
    "Zoo",
    "audit_data",
    "audit_model",
    "audit_zoo",
    "influence_map",
    "influence_without_boundaries",
    "is_packed_folder",
]
