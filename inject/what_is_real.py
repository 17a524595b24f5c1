"""Generate the page about fidelity: `python -m faultbed.inject.what_is_real > docs/what-is-real.md`.

Fault kinds are read from the catalogue, so that none can be missing. All other parts of a lab are listed here.
"""

from __future__ import annotations

import sys

from faultbed.inject.fault_page import rows
from faultbed.inject.kinds.catalogue import CATALOGUE, FaultKind

__all__ = ["markdown"]

_HEAD = """\
# What is real, emulated, modelled

Written by `python -m faultbed.inject.what_is_real > docs/what-is-real.md`: change that module or the catalogue, not
this page.

- **real**: the real cause with its real effect.
- **emulated**: the real symptom, produced by another cause. Software that reacts to the symptom reacts as usual.
- **modelled**: computed or recorded; no packet shows it.

A number of a soft lab is meaningful only as a ratio to another number of the same run, never in Gb/s. **Nothing here
has been run on rack hardware yet.** Once a kind has been, its catalogue entry says so (`tried`), and so does this page.

## The lab

| part | soft lab | rack lab | run on hardware |
|---|---|---|---|
| RoCEv2 transport: PSN, ACK, NAK, RNR, go-back-N | real: the kernel's `rdma_rxe` | real: the RNIC's | not yet |
| verbs, queue pairs, completions | real: pyverbs | real: pyverbs | not yet |
| links, carrier | emulated: sockets between VMs, veth between switches | real | not yet |
| eBGP, ECMP, hash | real: FRR and the Linux kernel | real: the switch's, with another hash | not yet |
| routing schemes (`[fabric]`) | real: the kernel's; E-ECMP emulated: faultbed's hash | only planned | not yet |
| congestion: queues, ECN marks | emulated: tc and nftables in the fabric | real: the ASIC's | not yet |
| DCQCN | none: rxe does not react to CNPs | real: the RNIC's | not yet |
| PFC | none | real | not yet |
| path MTUs learnt by ICMP | none: rxe would apply them | in the kernel, for ten minutes; RNICs ignore it | not yet |
| GPUs | emulated: a busy process in a cgroup | real | not yet |
| GPU memory in transfers (GPUDirect) | none: host memory | real | not yet |
| latency and bandwidth | emulated: those of a VM's CPU | real | not yet |
| rate, queue and delay of a link (`faultbed_rate_scale`) | emulated: netem on switch ports | real | not yet |
| cost of 24,576 ranks (`python -m bench schedule`) | modelled | modelled | not planned |
| training jobs: sizes and order of collectives | modelled from published shapes | modelled | not yet |

## Faults
"""
_TAIL = """
## How this page stays correct

A test generates this page again and compares the two. A kind counts as tried on a lab only if a test has proved its
receipt there: armed, fired with a witness, cleared. A kind that a lab does not support is refused when it is planned,
and never passes.
"""


def markdown() -> str:
    """Return the whole page."""
    head = ("kind", "soft lab", "rack lab", "by, on a rack", "run on hardware")
    return "\n".join([_HEAD, *rows(head, (_row(kind) for kind in CATALOGUE.values()))]) + "\n" + _TAIL


def _row(kind: FaultKind) -> tuple[str, ...]:
    soft = kind.fidelity.get("soft", "not supported")
    if "soft" in kind.fidelity and "soft" not in kind.tried:
        soft += " (not yet run)"
    hardware = "not supported" if kind.on_rack is None else "yes" if "rack" in kind.tried else "not yet"
    return (f"`{kind.name}`", soft, kind.fidelity.get("rack", "not supported"), kind.on_rack or "", hardware)


if __name__ == "__main__":
    sys.stdout.write(markdown())
