"""Parse the output of a rack's tools, and judge it. Not yet run on hardware.

    pcie      /sys/bus/pci/devices/ADDRESS/{current,max}_link_{speed,width}   (Linux, sysfs-bus-pci)
    firmware  /sys/class/infiniband/NAME/{fw_ver,board_id}
    mlxlink   `mlxlink -d NAME -c`, text, with colours in a pipe too          (mstflint, mlxlink/modules/printutil)
    qos       `mlnx_qos -i NETDEV`, text                                      (MLNX_OFED, "mlnx_qos")
    gpu       what the host's watcher reads by NVML, JSON                     (faultbed.testbed.node.gpu.nvml)
    chrony    `chronyc -c tracking`                                           (chronyc(1), "-c")

Each parser returns plain data. It omits what it cannot parse, and the check that needs it reports that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from faultbed.testbed.node.gpu.nvml import clocks_set

__all__ = [
    "RAW_BER_MAX",
    "Gpu",
    "Gpus",
    "Qos",
    "chrony_offset_s",
    "chrony_uses_own_clock",
    "complaint",
    "gpu_wrong",
    "gpus",
    "keeps_up",
    "key_values",
    "link_unreported",
    "link_wrong",
    "pcie_unreported",
    "pcie_wrong",
    "qos",
    "qos_unreported",
    "qos_wrong",
]

Deviation = tuple[str, str]
"""The observed value, and the right one."""

RAW_BER_MAX = 1e-5
"""Maximum bit error rate before FEC. IEEE 802.3 (annex 120E) allows a PAM4 lane 2.4e-4 without loss. This bound is far
below that, so that it warns early."""
EFFECTIVE_BER_MAX = 1e-15
"""Maximum bit error rate after FEC, as in the data sheets of most ports."""
NO_ERROR_BER = re.compile(r"15E-255")
"""The error rate that mlxlink prints if it has counted no error."""

# Bits of nvmlClocksEventReasons (nvml.h). Idle, and limits that an administrator set, are no defects.
_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SHELL = re.compile(r"^sh: (line )?[0-9]+: ")
_NOT_REPORTED = frozenset({"", "N/A"})
_BERS = (("Raw Physical BER", RAW_BER_MAX), ("Effective Physical BER", EFFECTIVE_BER_MAX))
_PCIE = tuple(f"{bound}_link_{attribute}" for attribute in ("speed", "width") for bound in ("current", "max"))
_CHRONY_OFFSET, _CHRONY_FIELDS = 4, 14
_CHRONY_LOCAL = "7F7F0101"
"""The reference of a host without a source, in chrony's local mode: 127.127.1.1 (chronyc(1), "tracking")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as `faultbed.testbed.node.gpu.nvml.look` reports it.

    A field is None if the GPU does not report it. `why` is set if the GPU does not answer at all.
    """

    index: int
    why: str | None = None
    bus_id: str | None = None
    vbios: str | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    temp_c: int | None = None
    slowdown_c: int | None = None
    shutdown_c: int | None = None
    reasons: int | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    power_limit_w: int | None = None
    pcie: tuple[int | None, int | None] = (None, None)
    pcie_max: tuple[int | None, int | None] = (None, None)

    @property
    def place(self) -> str:
        """The GPU in messages: its index on the host, with its bus id if known."""
        return f"gpu{self.index}" + (f" ({self.bus_id})" if self.bus_id else "")

    @property
    def clocks_set(self) -> bool:
        """Whether its clocks are set or locked."""
        return self.reasons is not None and clocks_set(self.reasons, self.sm_mhz, self.sm_max_mhz)

    def has(self, reason: int) -> bool:
        """Return whether this bit of nvmlClocksEventReasons is set."""
        return bool((self.reasons or 0) & reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All GPUs of a host, with their driver's version; `why` says why there are none."""

    driver: str | None = None
    why: str | None = None
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """QoS settings of an RNIC: what it trusts, the priorities that PFC pauses, and the priority of each DSCP.

    None means that the RNIC does not report the setting.
    """

    trust: str | None
    pfc: frozenset[int] | None
    priority: Mapping[int, int]


def key_values(text: str) -> dict[str, str]:
    """Parse `Name   : value` lines of mlxlink, or `path:value` lines of sysfs from `grep -H`."""
    values = {}
    for line in _COLOUR.sub("", text).splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip():
            values[name.strip()] = value.strip()
    return values


def keeps_up(text: str) -> bool | None:
    """Parse `mlxconfig -e query KEEP_ETH_LINK_UP_Px`: whether the firmware keeps the port up; None: not reported.

    Columns are default, current and next boot (mstflint, mlxcfg_ui.cpp): the middle one counts.
    """
    match = re.search(
        r"^[^\w\n]*(?:RO)?[ \t]*KEEP_ETH_LINK_UP_P\d[ \t]+\S+[ \t]+(True\(1\)|False\(0\))[ \t]+\S+", text, re.MULTILINE
    )
    return match[1] == "True(1)" if match else None


def complaint(tool: str, text: str) -> str:
    """Return the first line of a tool's output in place of an answer: not installed, not permitted, not supported."""
    first_line = next((line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()), "")
    first_line = _SHELL.sub("", first_line)
    return f"{tool}: {first_line[:200]}" if first_line else f"{tool} printed nothing"


def pcie_wrong(values: Mapping[str, str]) -> list[Deviation]:
    """Return whether a PCIe link is slower or narrower than its maximum. `values` are by name of the sysfs file."""
    wrong = []
    for attribute in ("speed", "width"):
        now, most = values.get(f"current_link_{attribute}"), values.get(f"max_link_{attribute}")
        if now is not None and most is not None and now != most:
            wrong.append((f"PCIe {attribute} {now}", most))
    return wrong


def pcie_unreported(values: Mapping[str, str]) -> list[str]:
    """Return the sysfs files that are missing."""
    return [name for name in _PCIE if name not in values]


def link_wrong(values: Mapping[str, str]) -> list[Deviation]:
    """Return what is wrong with a link by mlxlink's `values`: it is down, has no FEC, or too many bit errors."""
    wrong = []
    if values.get("State", "Active") != "Active":
        wrong.append((f"State {values['State']}", "Active"))
    if values.get("FEC", "").startswith("No FEC"):
        wrong.append(("no FEC", "RS-FEC, on both ends"))
    for name, most in _BERS:
        value = values.get(name, "")
        if value not in _NOT_REPORTED and not NO_ERROR_BER.fullmatch(value) and _number(value, default=1.0) > most:
            wrong.append((f"{name} {value}", f"at most {most:g}"))
    # Errors are counted since the last clear, and training a link makes some. If their rate is reported, the rate
    # decides.
    errors, rate = values.get("Effective Physical Errors", ""), values.get("Effective Physical BER", "")
    is_rated = NO_ERROR_BER.fullmatch(rate) or _number(rate, default=1.0) <= EFFECTIVE_BER_MAX
    if errors not in _NOT_REPORTED and _number(errors, default=1.0) > 0 and not is_rated:
        wrong.append((f"{errors} errors that FEC did not correct", "none"))
    return wrong


def link_unreported(values: Mapping[str, str]) -> list[str]:
    """Return what mlxlink does not report. A port that is down need only report that."""
    if values.get("State", "Active") != "Active":
        return []
    names = ("State", "FEC", *(name for name, _ in _BERS), "Effective Physical Errors")
    return [name for name in names if values.get(name, "") in _NOT_REPORTED]


def qos(text: str) -> Qos:
    """Parse the output of `mlnx_qos -i`."""
    trust = re.search(r"Priority trust state:\s*(\w+)", text)
    enabled = re.search(r"PFC configuration:.*?enabled\s+((?:[01]\s+){7}[01])", text, re.DOTALL)
    priority = {
        int(dscp): int(match[1])
        for match in re.finditer(r"prio:(\d)\s+dscp:([\d,]+)", text)
        for dscp in match[2].split(",")
        if dscp
    }
    pfc = frozenset(index for index, flag in enumerate(enabled[1].split()) if flag == "1") if enabled else None
    return Qos(
        trust=trust[1] if trust else None,
        pfc=pfc,
        priority=priority,
    )


def qos_wrong(have: Qos, *, trust: str, pfc: Iterable[int], priority: Mapping[int, int]) -> list[Deviation]:
    """Return how an RNIC differs from the lab's QoS profile. Only an RNIC that trusts DSCP has a map of DSCPs."""
    wrong = []
    if have.trust is not None and have.trust != trust:
        wrong.append((f"trusts {have.trust}", trust))
    if have.pfc is not None and have.pfc != frozenset(pfc):
        wrong.append((f"PFC on {sorted(have.pfc) or 'no priority'}", str(sorted(pfc) or "no priority")))
    if trust == "dscp" and have.priority:
        for dscp, wanted in priority.items():
            if have.priority.get(dscp) != wanted:
                wrong.append((f"DSCP {dscp} in priority {have.priority.get(dscp, 'unknown')}", str(wanted)))
    return wrong


def qos_unreported(have: Qos, *, trust: str) -> list[str]:
    """Return the settings that mlnx_qos does not report. It shows the DSCP map only while DSCPs are trusted."""
    reported = {"trust": have.trust is not None, "PFC": have.pfc is not None}
    if trust == have.trust == "dscp":
        reported["the DSCP map"] = bool(have.priority)
    return [setting for setting, is_reported in reported.items() if not is_reported]


def gpus(text: str) -> Gpus:
    """Parse a watcher's report of its host's GPUs; a report of another format gives no GPUs and the reason."""
    try:
        return msgspec.json.decode(text, type=Gpus)
    except (msgspec.MsgspecError, RecursionError):
        why = "the host did not report its GPUs" + (f": {text.strip()[:200]}" if text.strip() else "")
        return Gpus(why=why, gpus=())


def gpu_wrong(gpu: Gpu) -> list[Deviation]:
    """Return what is wrong with a GPU: it is silent, throttled, without ECC, or on a narrow PCIe link.

    A lower PCIe generation is allowed while the GPU is idle. `faultbed.testbed.preflight.gpu_health_check` judges its
    memory and temperature.
    """
    if gpu.why is not None:
        return [(f"does not answer: {gpu.why}", "an answer")]
    wrong = [(f"throttled: {reason}", "not throttled") for bit, reason in _REASONS.items() if gpu.has(bit)]
    if gpu.ecc is False:
        wrong.append(("ECC off, so bit flips are not detected", "on (`nvidia-smi -e 1`, then a reset)"))
    if gpu.pcie[1] != gpu.pcie_max[1]:
        wrong.append((f"PCIe width {gpu.pcie[1]}", str(gpu.pcie_max[1])))
    if gpu.persistence is False:
        wrong.append(("persistence mode off, so the first job waits for the driver to load", "on"))
    return wrong


def chrony_offset_s(text: str) -> float | None:
    """Return the offset of the system clock from its sources in s; None: chrony does not report, or has no source."""
    cells = text.strip().split(",")
    if len(cells) != _CHRONY_FIELDS or cells[-1] == "Not synchronised":
        return None
    return abs(_number(cells[_CHRONY_OFFSET], default=1e9))


def chrony_uses_own_clock(text: str) -> bool:
    """Return whether the system clock is its own source: chrony's local mode, which reports an offset of 0."""
    return text.strip().partition(",")[0] == _CHRONY_LOCAL


def _number(text: str, *, default: float) -> float:
    try:
        number = float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return default
    return number if math.isfinite(number) else default
