"""Save the state of a machine before a role changes it, so that teardown can restore it.

A value is saved only before its first change, because a second run of the role would read the value that the first run
has set. Each role has a record file. Teardown removes each restored value from the record. Therefore a teardown that
was interrupted, or failed in part, can be run again.
"""

import contextlib
import json
import os
import subprocess
from typing import NamedTuple

from faultbed_state import StateError

__all__ = ["SavedState"]

FOLDER = "/var/lib/faultbed/found"
TIMEOUT_S = 900  # long enough to install packages


def run(argv):
    """Run a command, and wait until it ends.

    Raises:
        StateError: it ended with an error.
    """
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        output = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise StateError(f"`{' '.join(argv)[:200]}` ended with {done.returncode}: {output}")


def _private(path, flags):
    return os.open(path, flags, 0o600)


def _mode_and_owner(path):
    """Return mode, user and group of a file. If it does not exist, return the defaults for a new file."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path)
        return [status.st_mode & 0o7777, status.st_uid, status.st_gid]
    return [0o644, -1, -1]


class _SavedEntry(NamedTuple):
    """A value, sysctl or file of the record: kind and path, what was saved, and a description for messages."""

    kind: str
    path: str
    saved: "str | None"
    description: str


class SavedState:
    """The saved state of one role, a JSON file that only root can read: files of a switch may contain passwords.

    Its keys:
        sysctls: path below /proc/sys -> value.
        files: path -> text; None: the file did not exist.
        modes: path -> mode, user and group of files that existed.
        folders: folders that were created for files; teardown removes the empty ones.
        values: path of a file of sysfs or configfs -> value.
        undo: key -> command that restores a setting of a tool.
        unreadable: settings that their tool cannot report: key -> the value that the role set, and the boot in which it
            was set.
        unread: daemons that have not read a changed file: key -> the boot in which the file was written, and a command
            that makes the daemon read it.
        pending: key -> what a check after a change compares with, until the check has passed.
        after: key -> command that makes a daemon read its file again. Teardown runs it after it has restored all files.
    """

    def __init__(self, role, changes, *, folder=FOLDER, root="/"):
        self.path = os.path.join(folder, f"{role}.json")
        self.root = root
        self.changes = changes
        self.record = {"sysctls": {}, "files": {}, "folders": {}, "values": {}, "undo": {}, "unreadable": {}}
        self.record |= {"after": {}, "unread": {}, "modes": {}, "pending": {}}
        with contextlib.suppress(FileNotFoundError), open(self.path, encoding="utf-8") as file:
            self.record |= json.load(file)

    def sysctl(self, path, value):
        """Set a value below /proc/sys; return whether it was changed."""
        file = os.path.join(self.root, "proc/sys", path)
        with open(file, encoding="ascii") as source:
            current = source.read().strip()
        if current.split() == str(value).split() or not self.changes.should_make(
            f"sysctl {path.replace('/', '.')}={value}"
        ):
            return False
        self._save_once("sysctls", path, current)
        with open(file, "w", encoding="ascii") as target:
            target.write(str(value))
        return True

    def sysctls(self, values, keeper):
        """Set values below /proc/sys, now and at every boot by the file `keeper` (sysctl.d(5))."""
        for path, value in values.items():
            self.sysctl(path, value)
        if values:  # with slashes, because names of interfaces may have dots
            lines = "".join(f"{path} = {value}\n" for path, value in sorted(values.items()))
            self.file(keeper, f"# Written by faultbed; host_teardown removes it.\n{lines}")

    def value(self, path, value):
        """Write a value to a file of sysfs or configfs; return whether it was changed."""
        real = os.path.join(self.root, path.lstrip("/"))
        with open(real, encoding="ascii") as source:
            current = source.read().strip()
        if current.split() == str(value).split() or not self.changes.should_make(f"{path} = {value}"):
            return False
        self._save_once("values", path, current)
        with open(real, "w", encoding="ascii") as target:
            target.write(str(value))
        return True

    def folder(self, path):
        """Create a folder of configfs, which has no effect by itself; return whether it exists."""
        real = os.path.join(self.root, path.lstrip("/"))
        if os.path.isdir(real):
            return True
        if self.changes.check:
            return False
        self._save_once("folders", path, "made")
        os.mkdir(real)
        return True

    def command(self, key, *, current, desired, do, undo):
        """Run the command `do` if a tool's setting differs; return whether it did. `undo` restores the setting."""
        if current == desired or not self.changes.should_make(f"{key}: {desired} (was {current})"):
            return False
        self._save_once("undo", key, undo)
        run(do)
        return True

    def set_unreadable(self, key, *, desired, do, undo):
        """Set a value that its tool cannot report and a reboot resets; return whether a command ran.

        An empty `desired` runs `undo`. The value is saved after the tool has accepted it: a run that is interrupted in
        between sets it again.
        """
        entry = {"value": desired, "boot": self._boot()}
        last = self.record["unreadable"].get(key, {})
        if last == entry or (not desired and last.get("boot") != entry["boot"]):
            return False
        set_before = (last["value"] if last.get("boot") == entry["boot"] else "") or "nothing"
        if not self.changes.should_make(f"{key}: {desired or 'as it was'} ({set_before} was set in this boot)"):
            return False
        self._save_once("undo", key, undo)
        run(do if desired else undo)
        self.record["unreadable"][key] = entry
        self._save()
        return True

    def unread(self, key, argv=None):
        """Record, before a file is changed, that a daemon has not read the new file. A reboot makes the daemon read it.

        If `argv` is given, a teardown after that reboot runs it: the daemon must then read the restored file.
        """
        self.record["unread"][key] = {"boot": self._boot(), "argv": argv}
        if not self.changes.check:
            self._save()

    def after(self, key, argv, *, again=True):
        """Run `argv` to make a daemon read a changed file, unless it has. With `again`, teardown runs `argv`, too."""
        if self.has_unread(key) and self.changes.should_make(f"{key}: {' '.join(argv)}"):
            if again:
                self._save_once("after", key, argv)
            run(argv)
            self.has_read(key)

    def has_unread(self, key):
        """Return whether a daemon has not read a changed file yet."""
        return self.record["unread"].get(key, {}).get("boot") == self._boot()

    def has_read(self, key):
        """Record that a daemon has read all changes."""
        if self.record["unread"].pop(key, None):
            self._save()

    def pending(self, key, value=None):
        """Return the state before a change, with which a check after the change compares.

        It is the value that the first run saved, or `value` if no run has saved one.
        """
        if key not in self.record["pending"] and value is not None:
            self._save_once("pending", key, value)
        return self.record["pending"].get(key)

    def passed(self, key):
        """Record that the check has passed."""
        del self.record["pending"][key]
        self._save()

    def file(self, path, text, *, readers=()):
        """Write a file, or remove it if `text` is None; return whether it was changed.

        `readers` are the daemons that must read the change: key -> argv or None, as in `unread`.
        """
        old_text = self._read(path)
        if old_text == text:
            return False
        for key in readers:
            self.unread(key, readers[key])
        if not self.changes.should_make(f"{path} {'removed' if text is None else 'written'}"):
            return False
        if old_text is not None:
            self._save_once("modes", path, _mode_and_owner(os.path.join(self.root, path.lstrip("/"))))
        self._save_once("files", path, old_text)
        for folder in self._missing_folders(path):
            self._save_once("folders", folder, "made")
        self._write(path, text)
        return True

    def restore(self):
        """Restore everything that is saved; return the number of saved values.

        A value that cannot be restored stays in the record. Earlier changes of the same thing (the first word of a key)
        are then skipped; all other values are restored.

        Raises:
            StateError: a value could not be restored.
        """
        count = sum(len(self.record[kind]) for kind in ("sysctls", "files", "values", "undo"))
        failed = []
        self._restore_tools(failed)
        for entry in self._saved_entries():
            if self.changes.should_make(entry.description) and self._restores(entry, failed):
                del self.record[entry.kind][entry.path]
        for key, argv in self._readers().items():
            if self.changes.should_make(f"{key}: {' '.join(argv)}"):
                self._succeeds(failed, key, run, argv)
        if failed:
            self._save()
            raise StateError(
                f"not restored: {'; '.join(failed)}. They are still saved in {self.path}; run the teardown again"
            )
        if not self.changes.check:
            self._remove_record()
        return count

    def _restore_tools(self, failed):
        """Restore the settings of tools, the last change first."""
        not_restored = set()
        for key, argv in reversed(list(self.record["undo"].items())):
            thing = key.split()[0]
            if thing in not_restored or not self.changes.should_make(f"{key}: as it was"):
                continue
            if self._succeeds(failed, key, run, argv):
                del self.record["undo"][key]
                self._save()
            else:
                not_restored.add(thing)

    def _saved_entries(self):
        """Yield every saved value, sysctl and file."""
        # In reverse order, because a write may also have changed a value that was saved before it.
        for path, value in reversed(list(self.record["values"].items())):
            yield _SavedEntry("values", path, value, f"{path}={value}")
        for path, value in list(self.record["sysctls"].items()):
            yield _SavedEntry("sysctls", path, value, f"sysctl {path.replace('/', '.')}={value}")
        for path, text in list(self.record["files"].items()):
            yield _SavedEntry("files", path, text, f"{path} {'removed' if text is None else 'as it was'}")

    def _restores(self, entry, failed):
        """Restore a saved entry, and return whether that succeeded. If it fails, add the reason to `failed`."""
        if entry.kind == "files":
            return self._succeeds(failed, entry.description, self._write, entry.path, entry.saved)
        file = f"proc/sys/{entry.path}" if entry.kind == "sysctls" else entry.path.lstrip("/")
        return self._succeeds(failed, entry.description, self._put_value, file, entry.saved)

    def _succeeds(self, failed, description, do, *args):
        """Call `do`, and return whether it succeeded. If it fails, add the reason to `failed`."""
        try:
            do(*args)
        except (StateError, OSError, subprocess.SubprocessError) as error:
            failed.append(f"{description}: {error}")
            return False
        return True

    def _readers(self):
        """Return the commands that make daemons read the restored files: key -> argv.

        Such a daemon has read a role's file, because the role made it do so or because the machine has booted since.
        """
        restarted = {
            key: entry["argv"]
            for key, entry in self.record["unread"].items()
            if entry["argv"] and entry["boot"] != self._boot()
        }
        return restarted | self.record["after"]

    def _put_value(self, path, value):
        """Write a saved value, unless the file is missing: then it vanished with its device or at a reboot."""
        real = os.path.join(self.root, path)
        if os.path.exists(real):
            with open(real, "w", encoding="ascii") as file:
                file.write(value)

    def _remove_record(self):
        """Remove empty folders that were created for files, and then the record."""
        for folder in sorted(self.record["folders"], key=len, reverse=True):
            with contextlib.suppress(OSError):  # not empty: another program uses the folder
                os.rmdir(os.path.join(self.root, folder.lstrip("/")))
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
        with contextlib.suppress(OSError):  # not empty: other roles have records
            os.rmdir(os.path.dirname(self.path))

    def _save_once(self, kind, path, value):
        if path in self.record[kind]:
            return
        self.record[kind][path] = value
        self._save()

    def _boot(self):
        with open(os.path.join(self.root, "proc/sys/kernel/random/boot_id"), encoding="ascii") as file:
            return file.read().strip()

    def _save(self):
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with open(f"{self.path}.new", "w", encoding="utf-8", opener=_private) as file:
            json.dump(self.record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self.path}.new", self.path)

    def _missing_folders(self, path):
        missing, folder = [], os.path.dirname(path)
        while not os.path.isdir(os.path.join(self.root, folder.lstrip("/"))):
            missing.append(folder)
            folder = os.path.dirname(folder)
        return missing

    def _read(self, path):
        try:
            with open(os.path.join(self.root, path.lstrip("/")), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _write(self, path, text):
        real = os.path.join(self.root, path.lstrip("/"))
        if text is None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(real)
            return
        os.makedirs(os.path.dirname(real), exist_ok=True)
        with open(f"{real}.new", "w", encoding="utf-8", opener=_private) as file:
            file.write(text)
            mode, *owner = self.record["modes"].get(path) or _mode_and_owner(real)
            os.fchown(file.fileno(), *owner)  # the daemon that reads the file may not run as root
            os.fchmod(file.fileno(), mode)
        os.replace(f"{real}.new", real)
