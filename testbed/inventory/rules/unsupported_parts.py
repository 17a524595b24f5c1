"""Parts of a rack that faultbed does not drive: what still works with them, and what does not. Pure.

A part is known by a name in the inventory: an RNIC by its `driver` or its default name, a GPU by its `kind`, a switch
by its `nos`. Support is added in one place: remove the row, and add the mechanisms, counters and checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from faultbed.testbed.inventory.audit_finding import InventoryFinding
from faultbed.testbed.inventory.consistency import Entries

__all__ = ["UNSUPPORTED", "UnsupportedPart", "check_parts", "unsupported"]

_RNIC_MISSING = "its counters, QoS, firmware checks and faults at the RNIC"
_RNIC_WORKS = "traffic, probes, captures, link.down and link.flap of its switch port, and switch-side faults still work"
_GPU_MISSING = "its health, counters, faults and compute phases (faultbed reads NVML)"
_GPU_WORKS = "traffic from host memory, probes, captures, and faults of RNICs, links and switches still work"
_SWITCH_MISSING = "its provisioning, preflight, counters and faults"
_SWITCH_WORKS = "traffic, probes, captures at hosts, and faults at hosts, RNICs and other switches still work"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedPart:
    """A kind of RNIC, GPU or switch without support. `pattern` matches its whole name in the inventory, in lower case.

    `name` is the product with its article, `missing` what faultbed cannot do with it, `works` what it still can,
    `source` where that is documented.
    """

    part: Literal["RNIC", "GPU", "switch"]
    pattern: str
    name: str
    missing: str
    works: str
    source: str


UNSUPPORTED = (
    UnsupportedPart(
        part="RNIC",
        pattern=r"bnxt_(re|en).*",
        name="a Broadcom NetXtreme-E (Thor) RNIC",
        missing=_RNIC_MISSING,
        works=_RNIC_WORKS,
        source="Linux, drivers/infiniband/hw/bnxt_re/hw_counters.c",
    ),
    UnsupportedPart(
        part="RNIC",
        pattern=r"(irdma|i40iw|ice).*",
        name="an Intel E800 RNIC",
        missing=_RNIC_MISSING,
        works=_RNIC_WORKS,
        source="Linux, drivers/infiniband/hw/irdma/verbs.c",
    ),
    UnsupportedPart(
        part="RNIC",
        pattern=r"ionic.*",
        name="an AMD Pensando RNIC",
        missing=_RNIC_MISSING,
        works=_RNIC_WORKS,
        source="Linux, drivers/infiniband/hw/ionic/ionic_hw_stats.c",
    ),
    UnsupportedPart(
        part="RNIC",
        pattern=r"efa.*",
        name="an Elastic Fabric Adapter of AWS",
        missing="traffic (it has no connected queue pairs), its counters and faults at the RNIC",
        works="captures and faults at hosts and at your own switches still work; the network of AWS is out of reach",
        source="Linux, drivers/infiniband/hw/efa/efa_verbs.c: datagrams (UD, SRD), no connected queue pairs",
    ),
    UnsupportedPart(
        part="GPU",
        pattern=r"(amd.*|instinct.*|mi[0-9]{2,3}.*)",
        name="an AMD Instinct GPU",
        missing=_GPU_MISSING,
        works=_GPU_WORKS,
        source="amd-smi and its library have another interface than NVML (ROCm/amdsmi)",
    ),
    UnsupportedPart(
        part="GPU",
        pattern=r"(habana.*|gaudi.*|hl-?[0-9].*)",
        name="an Intel Gaudi accelerator",
        missing=_GPU_MISSING,
        works=_GPU_WORKS,
        source="hl-smi, libhlml (Gaudi documentation)",
    ),
    UnsupportedPart(
        part="GPU",
        pattern=r"(intel.*|ponte.*|pvc.*|max-?1[0-9]{3}.*)",
        name="an Intel Data Center GPU",
        missing=_GPU_MISSING,
        works=_GPU_WORKS,
        source="xpu-smi, Level Zero (intel/xpumanager)",
    ),
    UnsupportedPart(
        part="switch",
        pattern=r"eos",
        name="Arista EOS",
        missing=_SWITCH_MISSING,
        works=_SWITCH_WORKS,
        source="eAPI and CLI of its own; no ConfigDB, no FRR",
    ),
    UnsupportedPart(
        part="switch",
        pattern=r"nxos",
        name="Cisco NX-OS",
        missing=_SWITCH_MISSING,
        works=_SWITCH_WORKS,
        source="NX-API and CLI of its own; no ConfigDB, no FRR",
    ),
    UnsupportedPart(
        part="switch",
        pattern=r"junos",
        name="Juniper Junos",
        missing=_SWITCH_MISSING,
        works=_SWITCH_WORKS,
        source="NETCONF and CLI of its own; no ConfigDB, no FRR",
    ),
    UnsupportedPart(
        part="switch",
        pattern=r"nvue",
        name="Cumulus Linux managed by NVUE",
        missing=_SWITCH_MISSING,
        works=_SWITCH_WORKS,
        source="nvued writes frr.conf and the QoS files again (Cumulus Linux, NVUE)",
    ),
    UnsupportedPart(
        part="switch",
        pattern=r"fboss",
        name="FBOSS",
        missing=_SWITCH_MISSING,
        works=_SWITCH_WORKS,
        source="facebook/fboss: agent configuration by thrift, Open/R or bgp++ instead of FRR",
    ),
)


def unsupported(part: str, *names: str | None) -> UnsupportedPart | None:
    """Return the row that matches one of a part's names, or None if faultbed supports the part or does not know it."""
    for row in UNSUPPORTED:
        if row.part == part and any(name and re.fullmatch(row.pattern, name.lower()) for name in names):
            return row
    return None


def check_parts(entries: Entries) -> Iterator[InventoryFinding]:
    """Yield a finding for each part that faultbed does not drive."""
    for host_name, host in entries.hosts.items():
        for rnic in host.rnics:
            place = f"hosts.{host_name}.rnics[{rnic.name}].{'driver' if rnic.driver else 'name'}"
            yield from _finding(place, rnic.driver or rnic.name, unsupported("RNIC", rnic.driver, rnic.name))
        for gpu in host.gpus:
            yield from _finding(f"hosts.{host_name}.gpus[{gpu.name}].kind", gpu.kind, unsupported("GPU", gpu.kind))
    for name, (role, switch) in entries.switches.items():
        yield from _finding(f"{role}.{name}.nos", str(switch.nos), unsupported("switch", switch.nos))


def _finding(place: str, value: str, row: UnsupportedPart | None) -> Iterator[InventoryFinding]:
    if row is not None:
        yield InventoryFinding(
            place=place, what=f'"{value}" is {row.name}: faultbed does not support {row.missing}', do=row.works
        )
