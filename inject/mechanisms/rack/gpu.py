"""GPUs: clocks, power limits and removal by `nvidia-smi`, neighbours, events by DCGM. Not yet run on hardware.

`-lgc`, `-rgc`, `-pl` and the fields of `--query-gpu` are nvidia-smi's (its manual page, `--help-query-gpu`). Only the
clock itself shows a locked clock: the GPU keeps it whether it works or not, without an event reason
(`testbed.node.nvml.clocks_set`). An earlier lock could not be restored, so that such a GPU is refused.
`dcgmi test --inject` writes a value into DCGM's cache only (DCGM documentation, "Error injection"): programs that
read DCGM see it, no GPU does.

The driver itself removes a GPU from the bus (NVML, "Drain states": nvmlDeviceModifyDrainState, nvmlDeviceRemoveGpu)
and fails if it is in use. A `remove` written into sysfs does not fail: the driver waits inside the kernel, where
no signal is delivered, until every user of the GPU has closed it, the persistence daemon included
(open-gpu-kernel-modules, nv_pci_remove_helper).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Mechanism, Request, Step, flap_edges, holder_request, on_host
from inject.mechanisms.rack.rack_mechanism import PCI, Commands, RackMechanism, by_commands
from testbed.errors import Unsupported
from testbed.node.nvml import TOP_SHARE

__all__ = ["BY_KIND", "MECHANISMS"]

MECHANISMS = (
    RackMechanism(
        kind="gpu.throttle",
        fidelity="real",
        by="nvidia-smi: locked clocks (-lgc), read back by the clock; refused if they are locked already",
    ),
    RackMechanism(
        kind="gpu.power-cap", fidelity="real", by="nvidia-smi: power limit (-pl), read back; must be reached to count"
    ),
    RackMechanism(
        kind="gpu.xid", fidelity="modelled", by="DCGM: a value injected into its cache (dcgmi test --inject)"
    ),
    RackMechanism(
        kind="gpu.noisy-neighbour",
        fidelity="real",
        by="the CUDA driver: processes that compute on the same GPU, as NVML lists them",
    ),
    RackMechanism(
        kind="gpu.lost",
        fidelity="real",
        by="nvidia-smi: drained and removed by the driver, then a PCIe rescan; refused if a process has it open",
    ),
)
_HOLDERS = "nvidia-fabricmanager nvidia-dcgm dcgm nvidia-persistenced"
"""Services that use a GPU, according to NVIDIA; on HGX machines the first one always runs."""
XID_FIELD = "230"
"""DCGM_FI_DEV_XID_ERRORS (dcgm_fields.h)."""
# Above this share of busy time, a clock below the limit is due to the limit.
_BUSY_PERCENT = 50
# Reasons 0x4 to 0x80 (power cap, slowdowns, brake: nvml.h) lower a clock, too: then a low clock proves no lock.
# nvidia-smi takes the nearest clock that the GPU has; those of an H100 are 15 MHz apart.
_STEP_MHZ = 15


def _bus(request: Request) -> str:
    gpu = request.target.gpu
    if gpu is None or gpu.pcie is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no pcie for it; add it"
        )
    return gpu.pcie


def _query(bus: str, fields: str) -> tuple[str, ...]:
    return ("nvidia-smi", "-i", bus, f"--query-gpu={fields}", "--format=csv,noheader,nounits")


def _throttle(request: Request) -> Mechanism:
    bus, left = _bus(request), f"{100 - request.params['percent']:g}"
    limit = f"int({{max}} * {left} / 100)"
    query = " ".join(_query(bus, "clocks_event_reasons.active,clocks.sm,utilization.gpu"))
    judge = (
        f"{{ low = $2 <= {limit} + {_STEP_MHZ}; none = $1 ~ /^0x0+$/; bit = substr($1, length($1)) ~ /[2367abefABEF]/; "
        "tail = substr($1, length($1) - 1); sick = tail ~ /[4-9a-fA-F]$/ || tail ~ /^[2-9a-fA-F]/; "
        f"held = bit || low && !sick && (none || $3 >= {_BUSY_PERCENT}); locked = none && $2 < {{max}} * {TOP_SHARE}; "
        'print (held ? "held" : low && sick ? "slowed" : locked ? "locked" : "free"), $0 }'
    )
    # A clock that is still rising has no reason either: it has arrived at the next reading.
    once = f"w=$({query} | awk -F', *' '{judge}')"
    look = f'for i in 1 2 3; do {once}; case $w in locked*) sleep 0.3;; *) break;; esac; done; echo "$w"'
    commands = Commands(
        needs=("nvidia-smi", "awk"),
        remember={"max": (_query(bus, "clocks.max.sm"), "^([0-9]+)$")},
        on=(("sh", "-c", f"mhz=$(awk 'BEGIN {{ print {limit} }}'); nvidia-smi -i {bus} -lgc $mhz,$mhz"),),
        off=(("nvidia-smi", "-i", bus, "-rgc"),),
        look=("sh", "-c", look),
        applied="^held",
        normal="^free",
    )
    return _on_gpu(request, commands, bus, state="clocks_set")


def _power_cap(request: Request) -> Mechanism:
    bus, left = _bus(request), f"{100 - request.params['percent']:g}"
    watts = f"$(awk 'BEGIN {{ print int({{most}} * {left} / 100) }}')"
    look = (
        f"now=$({' '.join(_query(bus, 'power.limit'))}); "
        f'[ "${{now%%.*}}" -le "{watts}" ] && echo capped $now || echo free $now'
    )
    commands = Commands(
        needs=("nvidia-smi", "awk"),
        remember={
            "was": (_query(bus, "power.limit"), r"^([0-9]+)"),
            "most": (_query(bus, "power.default_limit"), r"^([0-9]+)"),
            "least": (_query(bus, "power.min_limit"), r"^([0-9]+)"),
        },
        # nvidia-smi refuses less than the GPU's minimum by itself; this message is clearer and comes before any change.
        on=(
            (
                "sh",
                "-c",
                f'[ "{watts}" -ge {{least}} ] || {{ echo "below the GPU limit of at least {{least}} W" >&2; exit 1; }}',
            ),
            ("sh", "-c", f'nvidia-smi -i {bus} -pl "{watts}"'),
        ),
        off=(("nvidia-smi", "-i", bus, "-pl", "{was}"),),
        look=("sh", "-c", look),
        applied="^capped",
        normal="^free",
    )
    return _on_gpu(request, commands, bus, state="power_capped")


def _on_gpu(request: Request, commands: Commands, bus: str, *, state: str) -> Mechanism:
    name = f"{request.target.node}/{request.target.gpu.name if request.target.gpu else ''}"
    return by_commands(
        request,
        commands,
        node=request.target.node,
        claims=f"{name}/clocks",
        shows={"gpu": bus},
        while_on=((f"{name}.{state}", 1),),
        restored=((f"{name}.{state}", 0),),
    )


def _xid(request: Request) -> Mechanism:
    bus, xid = _bus(request), str(request.params["xid"])
    # DCGM numbers GPUs itself: its number can differ from NVML's, and its bus ids have eight digits of domain.
    entity, tail = "{entity}", re.escape(bus.partition(":")[2])
    # Without the offset the value is dated a second ahead (DCGM, dcgmi test --help).
    inject = ("dcgmi", "test", "--inject", "--gpuid", entity, "--offset", "0", "-f", XID_FIELD, "-v")
    commands = Commands(
        needs=("dcgmi",),
        remember={
            "entity": (
                ("dcgmi", "discovery", "-l"),
                rf"(?i)^\| *([0-9]+) +\| Name:[^\n]*\n\|[^\n]*PCI Bus ID: *[0-9a-f]*:{tail}",
            )
        },
        on=((*inject, xid),),
        off=((*inject, "0"),),
        look=("dcgmi", "dmon", "-i", entity, "-e", XID_FIELD, "-c", "1"),
        applied=f"^GPU +{entity} +{xid}( |$)",
        normal=f"^GPU +{entity} +(0|N/A)( |$)",
    )
    claims = f"{request.target.node}/{request.target.gpu.name if request.target.gpu else bus}/dcgm"
    return by_commands(
        request, commands, node=request.target.node, claims=claims, shows={"gpu": bus}, edges=flap_edges(request)
    )


def _noisy_neighbour(request: Request) -> Mechanism:
    bus, count, host = _bus(request), request.params["neighbours"], request.target.node
    gpu = f"{host}/{request.target.gpu.name if request.target.gpu else ''}"
    busy = f"{host}/hogs.running"
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "gpu_neighbour", {"pcie": bus, "count": count}, claims=f"{host}/hog"),
        steps=(Step(do=f"# {count} processes that compute on GPU {bus} without pause (CUDA driver)", undo="kill %1"),),
        must_move=(),
        must_not_move=(),
        # The driver lists the processes on a GPU, independently of the holder.
        while_on=((busy, count), (f"{gpu}.neighbours", count)),
        restored=((busy, 0),),
        shows={"gpu": bus, "processes": count, "computing": count},
    )


def _lost(request: Request) -> Mechanism:
    bus, host = _bus(request), request.target.node
    drain, there = ("nvidia-smi", "drain", "-p", bus), f"{PCI}/devices/{bus}"
    commands = Commands(
        needs=("nvidia-smi",),
        able=(
            (("test", "-w", f"{PCI}/rescan"), "^", "the PCI bus cannot be rescanned: run as root"),
            (
                ("nvidia-smi", "-i", bus, "--query-compute-apps=pid", "--format=csv,noheader"),
                r"\A\s*\Z",
                "a process computes on this GPU, and the driver removes no GPU in use: end it, or use gpu.throttle",
            ),
            (
                ("sh", "-c", f"for s in {_HOLDERS}; do systemctl is-active --quiet $s && echo $s; done; true"),
                r"\A\s*\Z",
                "a daemon has this GPU open, and the driver removes no GPU in use: stop it, or use gpu.throttle",
            ),
        ),
        remember={"persistence": (_query(bus, "persistence_mode"), "^(Enabled|Disabled)$")},
        # Persistence mode counts as a use of the GPU (nvmlDeviceRemoveGpu).
        on=(("nvidia-smi", "-i", bus, "-pm", "0"), (*drain, "-m", "1"), (*drain, "-r")),
        off=(
            ("sh", "-c", f"[ -e {there} ] || echo 1 > {PCI}/rescan"),
            (*drain, "-m", "0"),
            ("sh", "-c", f'[ "{{persistence}}" = Disabled ] || nvidia-smi -i {bus} -pm 1'),
        ),
        look=("sh", "-c", f"[ -e {there} ] && echo present || echo absent"),
        applied="^absent$",
        normal="^present$",
        settle_s=20.0,
    )
    return by_commands(request, commands, node=host, claims=f"{host}/{bus}", shows={"pcie": bus})


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    ("gpu.throttle", "gpu"): _throttle,
    ("gpu.power-cap", "gpu"): _power_cap,
    ("gpu.xid", "gpu"): _xid,
    ("gpu.noisy-neighbour", "gpu"): _noisy_neighbour,
    ("gpu.lost", "gpu"): _lost,
}
