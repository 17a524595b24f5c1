"""A stand-in for libnvidia-ml.so.1: the C functions that faultbed calls through nvidia-ml-py, for simulated GPUs.

The functions fill the memory behind their pointers as nvml.h describes, and return its error codes. A missing function
is one that an older driver does not have.
"""

import ctypes
from dataclasses import dataclass, field

import pynvml

_OK, _NOT_SUPPORTED, _NOT_FOUND, _SHORT, _LOST = 0, 3, 6, 7, 15


@dataclass
class Card:
    """One GPU, healthy; None: it does not support that. `held_ns` by NVML's field number."""

    bus: str = "00000000:19:00.0"
    name: str = "NVIDIA H100 80GB HBM3"
    vbios: str = "96.00.74.00.01"
    reasons: int | None = 0
    sm_mhz: int | None = 1980
    sm_max_mhz: int | None = 1980
    ecc: int | None = 1
    uncorrected: int | None = 0
    corrected: int | None = 0
    celsius: int | None = 41
    limits_c: dict | None = field(default_factory=lambda: {0: 95, 1: 89})
    margin_c: int | None = None
    tlimits: dict = field(default_factory=dict)
    replays: int | None = 0
    remapped: tuple | None = (0, 0, 0, 0)
    persistence: int | None = 1
    mode: int | None = 0
    limit_mw: int | None = 700_000
    pcie: tuple = (5, 16)
    pcie_max: tuple = (5, 16)
    pids: list = field(default_factory=list)
    held_ns: dict = field(default_factory=lambda: {74: 5_000_000, 269: 2_000, 270: 1_000, 271: 0})
    power_mw: dict = field(default_factory=lambda: {185: 71_000, 186: 70_500})
    energy_mj: int | None = 1_000_000
    lost: bool = False


def put(pointer, value):
    """Write through a C pointer."""
    if value is None:
        return _NOT_SUPPORTED
    pointer._obj.value = value
    return _OK


class Library:
    """The object that `ctypes.CDLL("libnvidia-ml.so.1")` returns."""

    def __init__(self, cards, driver="550.54.15"):
        self.cards, self.driver, self.opened, self.init_rc = cards, driver, 0, _OK

    def nvmlInitWithFlags(self, _flags):  # noqa: N802 (NVML's own name)
        self.opened += self.init_rc == _OK
        return self.init_rc

    def nvmlShutdown(self):  # noqa: N802
        self.opened -= 1
        return _OK

    def nvmlErrorString(self, code):  # noqa: N802
        return {_LOST: b"GPU is lost"}.get(code, b"error %d" % code)

    def nvmlSystemGetDriverVersion(self, buffer, _size):  # noqa: N802
        buffer.value = self.driver.encode()
        return _OK

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        return put(count, len(self.cards))

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return _LOST if self.cards[index.value].lost else _OK

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):  # noqa: N802
        for index, card in enumerate(self.cards):
            if card.bus.lower().endswith(bus.value.decode().lower()):
                ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1
                return _OK
        return _NOT_FOUND

    def nvmlDeviceGetPciInfo_v3(self, handle, info):  # noqa: N802
        info._obj.busId = self._card(handle).bus.encode()
        return _OK

    def nvmlDeviceGetEccMode(self, handle, now, pending):  # noqa: N802
        return put(now, self._card(handle).ecc) or put(pending, 1)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter, count):  # noqa: N802
        card = self._card(handle)
        errors = {(1, 0): card.uncorrected, (0, 0): card.corrected, (1, 1): card.uncorrected, (0, 1): card.corrected}
        return put(count, errors[kind.value, counter.value])

    def nvmlDeviceGetTemperature(self, handle, sensor, celsius):  # noqa: N802
        assert sensor.value == 0  # the core
        return put(celsius, self._card(handle).celsius)

    def nvmlDeviceGetTemperatureThreshold(self, handle, kind, celsius):  # noqa: N802
        return put(celsius, (self._card(handle).limits_c or {}).get(kind.value))

    def nvmlDeviceGetMarginTemperature(self, handle, info):  # noqa: N802
        left = self._card(handle).margin_c
        info._obj.marginTemperature = left or 0
        return _NOT_SUPPORTED if left is None else _OK

    def nvmlDeviceGetRemappedRows(self, handle, *each):  # noqa: N802
        rows = self._card(handle).remapped
        return _NOT_SUPPORTED if rows is None else max(put(one, row) for one, row in zip(each, rows, strict=True))

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, array):  # noqa: N802
        pids = self._card(handle).pids
        room = count._obj.value
        count._obj.value = len(pids)
        if len(pids) > room:
            return _SHORT
        for at, pid in enumerate(pids):
            array[at].pid = pid
        return _OK

    def nvmlDeviceGetFieldValues(self, handle, count, values):  # noqa: N802
        for one in values._obj[: count.value]:
            if one.fieldId in (limits := self._card(handle).tlimits):
                one.nvmlReturn, one.valueType, one.value.siVal = _OK, 5, limits[one.fieldId]
                continue
            if one.fieldId in (power_mw := self._card(handle).power_mw):
                one.nvmlReturn, one.valueType, one.value.uiVal = _OK, 1, power_mw[one.fieldId]
                continue
            held_ns = self._card(handle).held_ns.get(one.fieldId)
            one.nvmlReturn = _NOT_SUPPORTED if held_ns is None else _OK
            one.valueType, one.value.ullVal = 3, held_ns or 0
        return _OK

    def nvmlDeviceGetClockInfo(self, handle, kind, mhz):  # noqa: N802
        assert kind.value == 1  # the SM clock
        return put(mhz, self._card(handle).sm_mhz)

    def nvmlDeviceGetMaxClockInfo(self, handle, kind, mhz):  # noqa: N802
        assert kind.value == 1
        return put(mhz, self._card(handle).sm_max_mhz)

    def _card(self, handle):
        return self.cards[ctypes.cast(handle, ctypes.c_void_p).value - 1]


def _text(name):
    def function(self, handle, buffer, _size):
        buffer.value = getattr(self._card(handle), name).encode()
        return _OK

    return function


def _number(name, at=None):
    def function(self, handle, pointer):
        value = getattr(self._card(handle), name)
        return put(pointer, value if at is None else value[at])

    return function


for _name, _function in {
    "GetName": _text("name"),
    "GetVbiosVersion": _text("vbios"),
    "GetCurrentClocksEventReasons": _number("reasons"),
    "GetPersistenceMode": _number("persistence"),
    "GetComputeMode": _number("mode"),
    "GetPcieReplayCounter": _number("replays"),
    "GetTotalEnergyConsumption": _number("energy_mj"),
    "GetPowerManagementLimit": _number("limit_mw"),
    "GetCurrPcieLinkGeneration": _number("pcie", 0),
    "GetCurrPcieLinkWidth": _number("pcie", 1),
    "GetMaxPcieLinkGeneration": _number("pcie_max", 0),
    "GetMaxPcieLinkWidth": _number("pcie_max", 1),
}.items():
    setattr(Library, f"nvmlDevice{_name}", _function)


def install(monkeypatch, tmp_path, cards, **rest):
    """Replace the library that nvidia-ml-py has loaded, and the file of the driver version."""
    from faultbed.testbed.node.gpu import nvml

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  550.54.15\n")
    monkeypatch.setattr(nvml, "_DRIVER", str(tmp_path / "version"))
    library = Library(cards, **rest)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library
