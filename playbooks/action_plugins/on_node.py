"""The action `on_node`: run a program of a role on a node, in a single exchange over the SSH connection.

An Ansible module costs a soft guest 5 to 15 s of emulated CPU, nearly all of it for importing Ansible's own library
there (AnsiballZ). Programs of our roles need the standard library only. So this action sends the source of the program
and of the `module_utils` that it imports to `python3 -` on the node, and reads one JSON object from its output.

    - ansible.legacy.on_node:
        program: roce_host.py         # in the role's files/
        desired: {...}                # the desired state, passed to the program's main(desired, check)
        files: {name: path}           # optional: files of the controller, passed as desired.files[name] in base64
        timeout_s: 60

The program prints {"changed": bool, "changes": [text, ...]}, or {"failed": true, "msg": text}. In check mode `check` is
true, and the program changes nothing.
"""

import base64
import json
import re
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

_IMPORT = re.compile(r"^from (faultbed_\w+) import ", re.MULTILINE)
_START = """\
import json, sys, types
def _load(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name + ".py", "exec"), module.__dict__)
    return module
"""
_KILL_AFTER_S = 5


class ActionModule(ActionBase):
    """The action plugin; Ansible looks for a class of this name."""

    _requires_connection = True
    _supports_check_mode = True
    _VALID_ARGS = frozenset({"program", "desired", "files", "timeout_s"})

    def run(self, tmp=None, task_vars=None):
        """Send the program, wait for it, and return its answer (see the module's docstring)."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if unknown := set(args) - self._VALID_ARGS:
            raise AnsibleActionFail(f"on_node: unknown arguments {', '.join(sorted(unknown))}")
        program = Path(self._find_needle("files", args["program"]))
        desired = dict(args.get("desired") or {})
        if files := args.get("files"):
            desired["files"] = {
                name: base64.b64encode(Path(path).read_bytes()).decode() for name, path in files.items()
            }
        timeout_s = int(args.get("timeout_s", 60))
        script = _script(program, desired, check=bool(self._task.check_mode))
        done = self._low_level_execute_command(
            f"timeout --kill-after={_KILL_AFTER_S} {timeout_s} /usr/bin/python3 -I -", in_data=script.encode()
        )
        result.update(_answer(program.stem, done, timeout_s))
        return result


def _script(program: Path, desired: dict, *, check: bool) -> str:
    """Return a Python script that loads the program and the modules that it imports, and calls its `main`."""
    sources: dict[str, str] = {}
    _collect(program, program.stem, sources)
    lines = [_START]
    lines += [f"_load({name!r}, {source!r})" for name, source in sources.items()]
    lines.append(f"sys.modules[{program.stem!r}].main(json.loads({json.dumps(desired)!r}), {check!r})")
    return "\n".join(lines) + "\n"


def _collect(path: Path, name: str, sources: dict[str, str]) -> None:
    """Add the source of a file to `sources`, by module name, after the module_utils that it imports."""
    text = path.read_text(encoding="utf-8")
    for other in _IMPORT.findall(text):
        if other not in sources:
            _collect(Path(__file__).parent.parent / "module_utils" / f"{other}.py", other, sources)
    sources[name] = text


def _answer(program: str, done: dict, timeout_s: int) -> dict:
    """Return the JSON object in the last line of a program's output, or a failure with the end of its output."""
    last = done["stdout"].strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    tail = " | ".join((done["stderr"] or done["stdout"]).strip().splitlines()[-4:])
    reason = f"did not end within {timeout_s} s" if done["rc"] in {124, 137} else f"ended with {done['rc']}"
    return {"failed": True, "msg": f"{program} {reason}: {tail}"}
