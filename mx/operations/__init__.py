"""What people who run a fleet use: the page, `mx top`, `mx topo`, `mx doctor`, the demonstration,
benchmarks, and what a service manager is told."""

from __future__ import annotations

from mx import config_values as values
from mx.config_values import CONNECTION, SettingDescription
from mx.packs import ASKING, LOGGING, Pack

PACK = Pack(
    names={"Observer": "mx.operations.observe", "Overview": "mx.operations.observe"},
    modules={"metrics": "mx.metrics"},
    verbs={
        "top": "mx.operations.verbs.top:top",
        "topo": "mx.operations.verbs.topo:topo",
        "web": "mx.operations.verbs.web:web",
        "doctor": "mx.operations.verbs.doctor:doctor",
        "demo": "mx.operations.verbs.demo:demo",
        "bench": "mx.operations.verbs.bench:bench",
    },
    settings={
        "web_listen": SettingDescription(
            "127.0.0.1:7680",
            values.address,
            "Where the page is; port 0 takes a free one.",
            metavar="HOST:PORT",
            flag="listen",
        ),
        "metrics": SettingDescription(
            "",
            values.address_or_none,
            "Where to give metrics to Prometheus, at /metrics; needs prometheus_client.",
            metavar="HOST:PORT",
            group=CONNECTION,
            unset="nowhere",
        ),
    },
    takes={
        "top": (*ASKING, *LOGGING),
        "topo": (*ASKING, "trusted_fabric", "nics"),
        "web": (*ASKING, *LOGGING, "web_listen"),
        "doctor": (
            *(*ASKING, "trusted_fabric", "nics", "listen", "advertise", "data_ports"),
            *("name_key", "cache_socket"),
        ),
        "serve": ("metrics",),
        "pull": ("metrics",),
        "coordinator": ("metrics",),
    },
    listeners=("mx.operations.notify:hear",),
    contexts={"mx.operations.accompany:measuring": ("metrics",)},
)
