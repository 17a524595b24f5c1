"""Fabrics of tens of thousands of GPUs as arrays: racks in zones, spines, and an aggregation tier. Modelled. Pure.

Every GPU has an RNIC at its rack switch (RTSW). An RTSW has one uplink to every spine (CTSW) of its zone. The CTSWs
with the same number in each zone form a plane; each has one uplink to every aggregation switch (ATSW) of its plane. The
taper is the capacity of the links below a CTSW divided by the capacity of its uplinks.

Meta's publications differ in the number of racks in a zone: 192 (24,576 GPUs, The Llama 3 Herd of Models, arXiv
2407.21783), and 252, 208 and 256 in talks about the design of 32,000 GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.max_min import Floats
from faultbed.testbed.suggestions import hint

__all__ = ["HOPS", "PRESETS", "Hops", "PresetFabric", "preset_named"]

HOPS = 6
"""Number of links of the longest path: RNIC, RTSW, CTSW, ATSW, CTSW, RTSW, RNIC."""
GPUS_PER_RACK = 16

Hops = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFabric:
    """The size of a fabric. All links run at `gbps`, except a CTSW's uplinks, whose total capacity the taper limits."""

    name: str
    zones: int
    racks: int
    ctsws: int = 16
    atsws: int = 0
    gpus_per_rack: int = GPUS_PER_RACK
    gbps: float = 400.0
    taper: float = 7.0

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.zones * self.racks * self.gpus_per_rack

    @property
    def uplinks_of_ctsw(self) -> int:
        """Number of uplinks of a CTSW: as given, or the number of full-speed links under the taper, at least one."""
        return self.atsws or max(1, round(self.racks / self.taper))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Return the number of directions of each kind: RNIC up and down, RTSW up and down, CTSW up and down."""
        uplinks = self.zones * self.racks * self.ctsws
        above = self.zones * self.ctsws * self.uplinks_of_ctsw
        return (self.gpus, self.gpus, uplinks, uplinks, above, above)

    @property
    def links(self) -> int:
        """Number of directions."""
        return sum(self._sizes)

    @property
    def capacity(self) -> Floats:
        """Bytes per second of each direction, shape (links,)."""
        per_link = self.gbps * 1e9 / 8
        above = per_link * self.racks / self.taper / self.uplinks_of_ctsw
        return np.repeat([per_link] * 4 + [above] * 2, self._sizes)

    def hops(self, src: Numbers, dst: Numbers, *, up: Numbers, above: Numbers) -> Hops:
        """Return the numbers of the directions that flows cross, shape (flows, HOPS); shorter paths are padded with -1.

        Args:
            src: number of the sending GPU of each flow, shape (flows,).
            dst: number of the receiving GPU, shape (flows,).
            up: CTSW that the sender's RTSW chooses, 0 to `ctsws` - 1, shape (flows,).
            above: ATSW that this CTSW chooses if the receiver is in another zone, shape (flows,).
        """
        first = np.concatenate(([0], np.cumsum(self._sizes)))[:-1]
        near, far = src // self.gpus_per_rack, dst // self.gpus_per_rack
        zone, far_zone = near // self.racks, far // self.racks
        leaves, crosses = near != far, zone != far_zone
        hops = np.full((len(src), HOPS), -1, dtype=np.int32)
        hops[:, 0] = np.where(src == dst, -1, first[0] + src)
        hops[:, 5] = np.where(src == dst, -1, first[1] + dst)
        hops[leaves, 1] = (first[2] + near * self.ctsws + up)[leaves]
        hops[leaves, 4] = (first[3] + far * self.ctsws + up)[leaves]
        uplinks = self.uplinks_of_ctsw
        hops[crosses, 2] = (first[4] + (zone * self.ctsws + up) * uplinks + above)[crosses]
        hops[crosses, 3] = (first[5] + (far_zone * self.ctsws + up) * uplinks + above)[crosses]
        return hops

    def hashed_hops(self, src: Numbers, dst: Numbers, rng: np.random.Generator) -> Hops:
        """Return the directions that flows cross if each switch picks a random next hop, like an ECMP hash does."""
        flows = len(src)
        return self.hops(
            src,
            dst,
            up=rng.integers(self.ctsws, size=flows),
            above=rng.integers(self.uplinks_of_ctsw, size=flows),
        )

    def pinned_hops(self, src: Numbers, dst: Numbers) -> Hops:
        """Return the directions that flows cross under scheme `pinned`: the receiver's place in its rack decides."""
        piece = dst % self.gpus_per_rack
        return self.hops(src, dst, up=piece % self.ctsws, above=piece % self.uplinks_of_ctsw)


PRESETS: Mapping[str, PresetFabric] = {
    preset.name: preset
    for preset in (
        PresetFabric(name="llama3-24k", zones=8, racks=192),
        PresetFabric(name="meta-32k", zones=8, racks=252, ctsws=18),
        PresetFabric(name="meta-32k-208", zones=8, racks=208, ctsws=18),
        PresetFabric(name="meta-32k-256", zones=8, racks=256, ctsws=18),
    )
}
"""Every preset by its name."""


def preset_named(name: str, *, taper: float | None = None) -> PresetFabric:
    """Return a preset, with another taper if one is given.

    Raises:
        UsageError: no such preset, or a taper that is not 1 or more.
    """
    if name not in PRESETS:
        raise UsageError(f'--preset: no fabric "{name}"; {hint(name, list(PRESETS))}')
    if taper is None:
        return PRESETS[name]
    if not 1 <= taper <= PRESETS[name].racks:  # NaN is refused, too
        raise UsageError(f"--taper {taper:g}: must be 1 to {PRESETS[name].racks}; 1 is full bisection")
    return replace(PRESETS[name], taper=taper)
