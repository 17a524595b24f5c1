"""What a role found on a host before it changed anything, so that teardown can put it back.

Each value is written down before it is changed, once: a second run finds our own value and must not take it for the
host's. The record is a file of its own for each role. A teardown takes out of it what is back, so that one that was cut
short, or that could not put all back, can be run again.
"""

import contextlib
import json
import os
import subprocess

from faultbed_state import StateError

__all__ = ["Found"]

FOLDER = "/var/lib/faultbed/found"
PATIENCE_S = 900  # the longest command is the installation of packages


def run(argv):
    """Run a command to its end."""
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    if done.returncode:
        told = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise StateError(f"`{' '.join(argv)[:200]}` ended with {done.returncode}: {told}")


def _private(path, flags):
    return os.open(path, flags, 0o600)


def _mode(path):
    """Mode, user and group of a file; of one that is not there those of a new file."""
    with contextlib.suppress(FileNotFoundError):
        was = os.stat(path)
        return [was.st_mode & 0o7777, was.st_uid, was.st_gid]
    return [0o644, -1, -1]


class Found:
    """The record of one role: `sysctls` (path below /proc/sys -> value), `files` (path -> text, None: not there).

    `values` are files of sysfs or configfs (path -> value), `undo` what puts a tool's setting back (key -> argv).
    `told` is what we told a tool that cannot tell its setting (key -> value, and the boot in which it holds), `after`
    what makes a daemon read its file again (key -> argv): done once all else has been put back. `unread` are daemons
    that have not read ours yet (key -> the boot in which it was written, and argv). `modes` are mode, user and group of
    files that were there. All of it is for root alone: files of a switch may have passwords in them.

    Folders that had to be made for files are in `folders`; those that are empty then go again.
    """

    def __init__(self, role, changes, *, folder=FOLDER, root="/"):
        self.path = os.path.join(folder, f"{role}.json")
        self.root = root
        self.changes = changes
        self.record = {"sysctls": {}, "files": {}, "folders": {}, "values": {}, "undo": {}, "told": {}}
        self.record |= {"after": {}, "unread": {}, "modes": {}}
        with contextlib.suppress(FileNotFoundError), open(self.path, encoding="utf-8") as file:
            self.record |= json.load(file)

    def sysctl(self, path, value):
        """Bring a value below /proc/sys to what is wanted; say whether it had to be changed."""
        file = os.path.join(self.root, "proc/sys", path)
        with open(file, encoding="ascii") as current:
            have = current.read().strip()
        if have.split() == str(value).split() or not self.changes.really(f"sysctl {path.replace('/', '.')}={value}"):
            return False
        self._keep("sysctls", path, have)
        with open(file, "w", encoding="ascii") as target:
            target.write(str(value))
        return True

    def sysctls(self, values, keeper):
        """Bring values below /proc/sys to what is wanted, now and by the file `keeper` at every boot (sysctl.d(5))."""
        for path, value in values.items():
            self.sysctl(path, value)
        if values:  # with slashes, because names of interfaces may have dots
            lines = "".join(f"{path} = {value}\n" for path, value in sorted(values.items()))
            self.file(keeper, f"# Written by faultbed; host_teardown removes it.\n{lines}")

    def value(self, path, value):
        """Bring a file of sysfs or configfs to a value; say whether it had to be changed."""
        real = os.path.join(self.root, path.lstrip("/"))
        with open(real, encoding="ascii") as current:
            have = current.read().strip()
        if have.split() == str(value).split() or not self.changes.really(f"{path} = {value}"):
            return False
        self._keep("values", path, have)
        with open(real, "w", encoding="ascii") as target:
            target.write(str(value))
        return True

    def folder(self, path):
        """Make a folder, which by itself changes nothing (configfs); say whether it is there."""
        real = os.path.join(self.root, path.lstrip("/"))
        if os.path.isdir(real):
            return True
        if self.changes.check:
            return False
        self._keep("folders", path, "made")
        os.mkdir(real)
        return True

    def command(self, key, *, have, want, do, undo):
        """Bring what a tool sets to what is wanted: `do` and `undo` are commands; say whether it had to be changed."""
        if have == want or not self.changes.really(f"{key}: {want} (was {have})"):
            return False
        self._keep("undo", key, undo)
        run(do)
        return True

    def told(self, key, *, want, do, undo):
        """As `command`, of a setting that its tool cannot tell and a reboot forgets; without a `want`, `undo` it.

        What we told the tool is written down after it took it: a run that was cut short in between tells it again.
        """
        mine = {"value": want, "boot": self._boot()}
        have = self.record["told"].get(key, {})
        if have == mine or (not want and have.get("boot") != mine["boot"]):
            return False
        since = (have["value"] if have.get("boot") == mine["boot"] else "") or "nothing"
        if not self.changes.really(f"{key}: {want or 'as it was'} (we had set {since} in this boot)"):
            return False
        self._keep("undo", key, undo)
        run(do if want else undo)
        self.record["told"][key] = mine
        self._save()
        return True

    def unread(self, key, argv=None):
        """Note, before a change, that a daemon has not read it; a restart of the machine will have let it.

        With `argv` a teardown after such a restart runs that, whether or not a role has.
        """
        self.record["unread"][key] = {"boot": self._boot(), "argv": argv}
        if not self.changes.check:
            self._save()

    def after(self, key, argv, *, again=True):
        """Let a daemon read what is `unread`, if there is such; with `again` also at the end of a teardown."""
        if self.waits(key) and self.changes.really(f"{key}: {' '.join(argv)}"):
            if again:
                self._keep("after", key, argv)
            run(argv)
            self.has_read(key)

    def waits(self, key):
        """Whether a daemon has something `unread`."""
        return self.record["unread"].get(key, {}).get("boot") == self._boot()

    def has_read(self, key):
        """Note that a daemon has read what there is."""
        if self.record["unread"].pop(key, None):
            self._save()

    def file(self, path, text, *, readers=()):
        """Bring a file to a text (None: it is not to be there); say whether it had to be changed.

        `readers` are the daemons (key -> argv or None) that have it `unread` then.
        """
        have = self._read(path)
        if have == text:
            return False
        for key in readers:
            self.unread(key, readers[key])
        if not self.changes.really(f"{path} {'removed' if text is None else 'written'}"):
            return False
        if have is not None:
            self._keep("modes", path, _mode(os.path.join(self.root, path.lstrip("/"))))
        self._keep("files", path, have)
        for folder in self._missing_folders(path):
            self._keep("folders", folder, "made")
        self._write(path, text)
        return True

    def put_back(self):
        """Everything as it was found; say how many things that took.

        What cannot be put back holds up nothing else but earlier changes of the same thing (the first word of a key),
        and stays in the record for the next time.
        """
        count = sum(len(self.record[kind]) for kind in ("sysctls", "files", "values", "undo"))
        failed = []
        self._undo(failed)
        for kind, path, told, do, args in self._things():
            if self.changes.really(told) and self._tried(failed, told, do, *args):
                del self.record[kind][path]
        for key, argv in self._readers().items():
            if self.changes.really(f"{key}: {' '.join(argv)}"):
                self._tried(failed, key, run, argv)
        if failed:
            self._save()
            raise StateError(f"not put back: {'; '.join(failed)}. What is left to do is in {self.path}")
        if not self.changes.check:
            self._forget()
        return count

    def _undo(self, failed):
        """Tools' settings, the last change first."""
        stuck = set()
        for key, argv in reversed(list(self.record["undo"].items())):
            thing = key.split()[0]
            if thing in stuck or not self.changes.really(f"{key}: as it was"):
                continue
            if self._tried(failed, key, run, argv):
                del self.record["undo"][key]
                self._save()
            else:
                stuck.add(thing)

    def _things(self):
        """What else is to be put back, in order: its place in the record, its words, what does it, of what."""
        for path, value in reversed(list(self.record["values"].items())):  # one may set another, too
            yield "values", path, f"{path}={value}", self._put_value, (path.lstrip("/"), value)
        for path, value in list(self.record["sysctls"].items()):
            told = f"sysctl {path.replace('/', '.')}={value}"
            yield "sysctls", path, told, self._put_value, (f"proc/sys/{path}", value)
        for path, text in list(self.record["files"].items()):
            yield "files", path, f"{path} {'removed' if text is None else 'as it was'}", self._write, (path, text)

    def _tried(self, failed, what, do, *args):
        """Do one thing of a teardown; say whether it went well, and add to `failed` why not."""
        try:
            do(*args)
        except (StateError, OSError, subprocess.SubprocessError) as error:
            failed.append(f"{what}: {error}")
            return False
        return True

    def _readers(self):
        """What daemons are told at the end of a teardown: those that a role told, or a restart since."""
        since = {
            key: one["argv"]
            for key, one in self.record["unread"].items()
            if one["argv"] and one["boot"] != self._boot()
        }
        return since | self.record["after"]

    def _put_value(self, path, value):
        """A file that is gone went with its device or at a restart, and what we had set went with it."""
        real = os.path.join(self.root, path)
        if os.path.exists(real):
            with open(real, "w", encoding="ascii") as file:
                file.write(value)

    def _forget(self):
        """Folders that were made for files go if they are empty, and at last the record."""
        for folder in sorted(self.record["folders"], key=len, reverse=True):
            with contextlib.suppress(OSError):  # not empty: somebody else's by now
                os.rmdir(os.path.join(self.root, folder.lstrip("/")))
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
        with contextlib.suppress(OSError):  # the records of other roles
            os.rmdir(os.path.dirname(self.path))

    def _keep(self, kind, path, value):
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
            mode, *owner = self.record["modes"].get(path) or _mode(real)
            os.fchown(file.fileno(), *owner)  # a daemon must still be able to read its own
            os.fchmod(file.fileno(), mode)
        os.replace(f"{real}.new", real)
