"""The pack of what lies beside weights on a disk, and of snapshots: digests, by which weights are
read in parts and shown as they come, and what ranks on one host read together; folders that hold
the states of all ranks. The kernel asks for what it needs of it by name (`mx.packs.optional`), and
does without where it is not there.
"""

from mx import config_values as values
from mx.config_values import STORES, SettingDescription
from mx.packs import ASKING, LOGGING, Pack

_MOVING = (
    *("name_key", "lender_key", "wait_s", "stall_timeout_s", "streams", "data_plaintext"),
    *("trusted_fabric", "nics", "trace"),
)
_SERVING = (
    *("listen", "advertise", "data_ports", "policy", "max_readers", "max_bandwidth"),
    *("control_memory", "max_request", "drain_grace_s"),
)

PACK = Pack(
    names={
        "FreezeReport": "mx.snapshots.freezing",
        "SignalFreezer": "mx.snapshots.signals",
        "Thawed": "mx.snapshots.thawing",
        "freeze": "mx.snapshots.freezing",
        "freeze_on_signal": "mx.snapshots.signals",
        "thaw": "mx.snapshots.thawing",
    },
    verbs={"freeze": "mx.snapshots.verbs:freeze", "thaw": "mx.snapshots.verbs:thaw"},
    additions={
        "serve": "mx.snapshots.verbs:SNAPSHOTS",
        "verify": "mx.snapshots.additions:INDEX",
    },
    settings={
        "snapshot_root": SettingDescription(
            "",
            values.text,
            "Folder with snapshots by the names of models, read before `checkpoint_root`.",
            metavar="DIR",
            group=STORES,
            unset="none",
        )
    },
    takes={
        "pull": ("snapshot_root",),
        "freeze": (*ASKING, *LOGGING, *_MOVING),
        "thaw": (*ASKING, *LOGGING, *_MOVING, *_SERVING),
    },
)
