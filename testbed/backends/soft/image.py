"""The guest image, built once from Debian packages and cached under the digest of its recipe.

Why the guest is reduced (measured: five VMs boot in about 40 s on two cores under TCG instead of 115 s):

* an initrd of busybox and a few modules instead of every driver;
* an uncompressed ELF kernel, entered through PVH, so that the guest does not unpack itself;
* uncompressed modules, only those in use: loading one under TCG would mean running xz in emulation;
* no udev (devtmpfs creates the device nodes) and only the units that SSH needs.

mmdebstrap works as a normal user where user namespaces are allowed, and as root everywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faultbed.testbed.backends.soft.ignored_signals import ignored_signals
from faultbed.testbed.directories import act_as_owner, cache_dir
from faultbed.testbed.errors import LabError

__all__ = ["Image", "build", "cached", "digest", "images_dir"]

SUITE = "trixie"
MIRROR = "http://deb.debian.org/debian"
DISK_MIB = 1536
BUILD_TIMEOUT_S = 900.0
NEEDED_MIB = 2500
"""Free space that a build needs at its peak: the tree, the disk and the kernel."""

PACKAGES = (
    "busybox-static",
    "dbus",
    "ethtool",
    "frr",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "iputils-ping",
    "kmod",
    "linux-image-amd64",
    "nftables",
    "openssh-server",
    "perftest",
    "procps",
    "python3",
    "python3-nftables",
    "python3-numpy",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "systemd",
    "systemd-sysv",
    "tcpdump",
)

_EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/lib/modules/*/kernel/sound/*",
    "/usr/lib/modules/*/kernel/drivers/gpu/*",
    "/usr/lib/modules/*/kernel/drivers/media/*",
    "/usr/lib/modules/*/kernel/drivers/net/wireless/*",
)

_CLEAN_UP_S = 60.0
_PROGRAM_S = 120.0
"""Deadline of a program that takes a second on an idle machine."""
"""How long mmdebstrap may take to remove its tree after it has been interrupted."""
_ZSTD_MAGIC = bytes.fromhex("28b52ffd")
_GUEST = Path(__file__).resolve().parent / "guest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A built guest: kernel (ELF), initrd and raw root disk, all read-only."""

    digest: str
    folder: Path

    @property
    def kernel(self) -> Path:
        """Uncompressed ELF kernel."""
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        """Initial RAM disk."""
        return self.folder / "initrd"

    @property
    def disk(self) -> Path:
        """Raw ext4 root disk; VMs write to overlays of it."""
        return self.folder / "disk.raw"

    @property
    def kernel_version(self) -> str:
        """The guest's `uname -r`."""
        return (self.folder / "kernel-version").read_text().strip()


def digest() -> str:
    """Return the name of this version's image: 12 hex digits of a hash of its recipe."""
    sha = hashlib.sha256(json.dumps([SUITE, DISK_MIB, PACKAGES, _EXCLUDED]).encode())
    for path in sorted(_GUEST.iterdir()):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:12]


def images_dir() -> Path:
    """Return the folder of cached images."""
    return cache_dir() / "images"


def cached() -> Image | None:
    """Return the cached image; None if it has not been built."""
    folder = images_dir() / digest()
    return Image(digest=digest(), folder=folder) if (folder / "complete").exists() else None


def build(progress: Callable[[str], None]) -> Image:
    """Return the image, building it if it is not in the cache.

    Args:
        progress: called with a short text for each step.

    Raises:
        LabError: a tool or disk space is missing, or the build failed; the message has the end of its log.
    """
    images = images_dir()
    images.mkdir(parents=True, exist_ok=True)
    with _only_builder(images / ".lock", progress):
        if existing := cached():
            return existing
        _check_can_build(images)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=images))
        try:
            _build_into(staging, progress)
            final = images / digest()
            shutil.rmtree(final, ignore_errors=True)
            staging.rename(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return Image(digest=digest(), folder=final)


def _check_can_build(folder: Path) -> None:
    missing = [tool for tool in ("mmdebstrap", "mke2fs", "zstd", "xz") if not _which(tool)]
    if missing:
        raise LabError(
            f"cannot build the VM image: {', '.join(missing)} not found; install with "
            "`apt-get install mmdebstrap e2fsprogs zstd xz-utils`, or run `make demo`, which installs them"
        )
    for place in (folder, Path(tempfile.gettempdir())):
        free_mib = shutil.disk_usage(place).free // 2**20
        if free_mib < NEEDED_MIB:
            raise LabError(
                f"cannot build the VM image: {place} has {free_mib} MiB free, {NEEDED_MIB} are needed; "
                "free disk space, or set FAULTBED_CACHE (and TMPDIR) to a larger disk"
            )


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _build_into(folder: Path, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    progress(f"building the VM image from Debian {SUITE} packages (about a minute)")
    # In unshare mode "root" is a subordinate user id that cannot enter a private cache folder: the results pass through
    # a folder with an unguessable name that every user may write during the build.
    exchange = Path(tempfile.mkdtemp(prefix="faultbed-image-"))
    exchange.chmod(0o711)
    out = exchange / os.urandom(8).hex()
    out.mkdir()
    out.chmod(0o777)
    guest = out / "guest"
    shutil.copytree(_GUEST, guest)
    for path in (guest, *guest.iterdir()):  # in a checkout under `umask 077`, only its owner can read the files
        path.chmod(0o755)
    log = folder / "build.log"
    try:
        _mmdebstrap(guest, out, log)
        (folder / "vmlinux").write_bytes(_unpack_kernel((out / "vmlinuz").read_bytes()))
        for name in ("initrd", "kernel-version", "packages"):
            shutil.copyfile(out / name, folder / name)
        copying = ["cp", "--sparse=always", str(out / "disk.raw"), str(folder / "disk.raw")]
        try:
            subprocess.run(copying, check=True, timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{folder}: copying the image took longer than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        shutil.rmtree(exchange, ignore_errors=True)
    for path in folder.iterdir():
        path.chmod(0o444)
    (folder / "complete").write_text(f"{time.monotonic() - started:.1f} s\n")
    progress(f"VM image built in {time.monotonic() - started:.0f} s")


def _mmdebstrap(guest: Path, out: Path, log: Path) -> None:
    hook = f'"{guest}/customize" "$1" "{guest}" "{out}" {DISK_MIB}'
    argv = [
        "mmdebstrap",
        "--variant=apt",
        f"--mode={_mode()}",
        "--format=null",
        "--architectures=amd64",
        f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        f"--customize-hook={hook}",
        SUITE,
        "/dev/null",
        f"deb {MIRROR} {SUITE} main",
    ]
    # INITRD=No: Debian's kernel hook would build a 36 MB initrd that nothing uses.
    environment = {**os.environ, "INITRD": "No", "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    with (  # deadline: `_end_build` has ended it
        log.open("wb") as sink,
        subprocess.Popen(
            argv, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        ) as build,
    ):
        try:
            code = build.wait(timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _end_build(build)
            raise LabError(
                f"building the VM image took longer than {BUILD_TIMEOUT_S:.0f} s; check the connection to {MIRROR}. "
                f"The end of its log:\n{_tail(log)}"
            ) from None
        except BaseException:
            _end_build(build)
            raise
    if code:
        raise LabError(
            f"building the VM image failed (mmdebstrap ended with {code}); check that the Debian mirror is "
            f"reachable. The end of its log:\n{_tail(log)}"
        )


def _end_build(build: subprocess.Popen[bytes]) -> None:
    """End mmdebstrap and all that it has started, and let it remove its tree of hundreds of MiB.

    After a signal, mmdebstrap only waits for its children. The signal is therefore sent to its whole process group.
    """
    with ignored_signals(), contextlib.suppress(ProcessLookupError):
        os.killpg(build.pid, signal.SIGTERM)
        try:
            build.wait(timeout=_CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            os.killpg(build.pid, signal.SIGKILL)


def _mode() -> str:
    """Return mmdebstrap's mode: user namespaces if possible, so that not even root's build can change the machine."""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        probe = subprocess.run(argv, capture_output=True, check=False, timeout=_PROGRAM_S)
    except subprocess.TimeoutExpired:
        return "auto"
    return "unshare" if probe.returncode == 0 else "auto"


def _unpack_kernel(image: bytes) -> bytes:
    """Return the ELF inside a zstd-compressed bzImage (Linux Documentation/arch/x86/boot.rst, `payload_offset`).

    Bytes after the compressed stream make zstd end with an error, but its output before them is complete.
    """
    start = image.find(_ZSTD_MAGIC)
    try:
        done = subprocess.run(
            ["zstd", "-dcq"], input=image[start:], capture_output=True, check=False, timeout=_PROGRAM_S
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"zstd did not unpack the guest's kernel in {_PROGRAM_S:g} s; repeat the command") from error
    if start < 0 or not done.stdout.startswith(b"\x7fELF"):
        raise LabError(
            "the guest's kernel image is not a zstd-compressed bzImage: this version of Debian is not supported"
        )
    return done.stdout


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


@contextlib.contextmanager
def _only_builder(lock: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("VM image: another faultbed is building it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _main() -> int:
    """Build the image before faultbed's own environment exists: `bootstrap` runs this module by the system's Python."""
    act_as_owner()
    # In the background, the build ignores Ctrl-C, and bootstrap sends SIGTERM: mmdebstrap must end in this case too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        build(lambda text: print(f"» {text}", file=sys.stderr, flush=True))
    except LabError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main())
