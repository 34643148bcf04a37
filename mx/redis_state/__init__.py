"""State of coordinators in Redis, which several share."""

from __future__ import annotations

from mx import config_values as values
from mx.config_values import CONNECTION, SettingDescription
from mx.packs import Pack

PACK = Pack(
    states=dict.fromkeys(("redis", "rediss"), "mx.redis_state.shared:REDIS"),
    settings={
        "state_mac": SettingDescription(
            "write",
            values.choice("write", "require"),
            "Coordinators sign what they keep in Redis. require: believe nothing there that is not "
            "signed; set it once all coordinators of the state sign.",
            metavar="write|require",
            group=CONNECTION,
        ),
    },
    takes={"coordinator": ("state_mac",)},
)
