"""Ansible's view of an inventory file, cached.

`ansible-inventory --list` takes about half a second, so its output is kept under FAULTBED_CACHE. The key is a digest of
the file and of the group_vars and host_vars beside it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

import yaml

from faultbed.testbed.directories import cache_dir
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.inventory.schema import near
from faultbed.testbed.shipped import playbooks
from faultbed.testbed.text_files import read_text

__all__ = ["digest_of", "listing"]

_MOST_VALUES = 1_000_000
"""Maximum number of values after aliases are expanded, against "billion laughs". The largest lab has far fewer."""
_LISTING_TIMEOUT_S = 60.0
_TEMPLATES = (b"{{", b"{%")


def listing(path: Path) -> dict[str, Any]:
    """Return the output of `ansible-inventory --list` for one file, decoded, from the cache if possible.

    Raises:
        ConfigError: the file is missing, not YAML, or Ansible refuses it.
        UsageError: Ansible is not installed.
    """
    text = _text(path)
    _refuse_bad_yaml(path, text)
    kept = cache_dir() / "inventory" / f"{_digest(path, text)}.json"
    with contextlib.suppress(OSError, ValueError):
        cached: dict[str, Any] = json.loads(kept.read_bytes())
        return cached
    answer = _run_ansible_inventory(path)
    with contextlib.suppress(OSError):  # with a read-only cache the next call is slow, too
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as partial:
            json.dump(answer, partial)
        Path(partial.name).replace(kept)
    return answer


def _text(path: Path) -> str:
    if not path.exists():
        inventories = sorted(str(other) for other in path.parent.glob("*.yml")) if path.parent.is_dir() else []
        suggestion = (
            near(str(path), inventories) if inventories else "; name an Ansible inventory, or a lab such as soft"
        )
        raise ConfigError(f"{path}: no such inventory{suggestion}")
    return read_text(path, "name an Ansible inventory (YAML)")


@functools.lru_cache(maxsize=16)
def _refuse_bad_yaml(path: Path, text: str) -> None:
    """Reject bad YAML, which Ansible reads as an empty inventory, and repeated keys, of which it uses the last."""
    try:
        root = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: not a YAML inventory: the top must be a mapping with `all:`")
    try:
        repeated_keys, size = _inspect(root)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep, or an anchor (&) that holds an alias (*) of itself") from None
    if size > _MOST_VALUES:
        words = f"its aliases (*) stand for {size:,} values, more than {_MOST_VALUES:,}; write them out, or use fewer"
        raise ConfigError(f"{path}: {words}")
    if repeated_keys is not None:
        raise ConfigError(f'{path}:{repeated_keys[1]}: "{repeated_keys[0]}" is written twice in one mapping')


def _compose(text: str) -> yaml.Node | None:
    """Parse a document with libyaml, which is ten times as fast. Errors are reported by the pure Python parser.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    with contextlib.suppress(AttributeError, yaml.YAMLError):  # PyYAML may be built without libyaml
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _inspect(root: yaml.Node) -> tuple[tuple[str, int] | None, int]:
    """Return the first repeated key of a mapping with its line, and the number of values that aliases expand to.

    Each node is visited once, because the number of aliases grows exponentially with nested anchors.

    Raises:
        RecursionError: the nesting is too deep, or an anchor contains itself.
    """
    repeated_keys: list[tuple[str, int]] = []
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise RecursionError
            return sizes[id(node)]
        sizes[id(node)] = 0
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in keys:
                    repeated_keys.append((key.value, key.start_mark.line + 1))
                keys.update([key.value] if isinstance(key.value, str) else [])
            size = 1 + sum(size_of(key) + size_of(value) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            size = 1 + sum(map(size_of, node.value))
        else:
            size = 1
        sizes[id(node)] = size
        return size

    size = size_of(root)
    return min(repeated_keys, key=lambda repeated: repeated[1], default=None), size


def digest_of(path: Path, answer: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an inventory: of the file, and of the group_vars and host_vars beside it that it uses.

    `answer` is its listing, which names its groups and hosts.
    """
    digest = hashlib.sha256(path.read_bytes())
    names = {"all", *answer, *answer.get("_meta", {}).get("hostvars", {})}
    for file, content in _vars_beside(path):
        if {file.parts[1], Path(file.parts[1]).stem} & names:
            digest.update(f"\0{file}\0".encode() + content)
    return digest.hexdigest()


def _vars_beside(path: Path) -> list[tuple[Path, bytes]]:
    """Return the files in the folders of variables beside an inventory, each with its content."""
    return [
        (file.relative_to(path.parent), file.read_bytes())
        for folder in ("group_vars", "host_vars")
        for file in sorted((path.parent / folder).rglob("*"))
        if file.is_file()
    ]


def _digest(path: Path, text: str) -> str:
    """Return a digest of what Ansible would read. It includes the path for templates, which may use inventory_dir."""
    vars_files = _vars_beside(path)
    contents = (text.encode(), *(content for _, content in vars_files))
    has_templates = any(mark in content for mark in _TEMPLATES for content in contents)
    location = path.resolve() if has_templates else path.name
    digest = hashlib.sha256(f"{version('ansible-core')}\0{location}\0{text}".encode())
    for file, content in vars_files:
        digest.update(f"\0{file}\0".encode() + content)
    return digest.hexdigest()


def _run_ansible_inventory(path: Path) -> dict[str, Any]:
    """Return the output of `ansible-inventory --list`, decoded."""
    beside = Path(sys.executable).with_name("ansible-inventory")
    program = str(beside) if beside.exists() else which("ansible-inventory")
    if program is None:
        raise UsageError("ansible-inventory is not installed: install faultbed with its dependencies (ansible-core)")
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(playbooks() / "ansible.cfg"),  # the user's own configuration must not apply
        "ANSIBLE_INVENTORY_ENABLED": "yaml",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
        "ANSIBLE_NOCOLOR": "1",
    }
    try:
        done = subprocess.run(
            [program, "-i", str(path.resolve()), "--list"],
            env=env,
            capture_output=True,
            text=True,
            timeout=_LISTING_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{path}: ansible-inventory did not answer within {_LISTING_TIMEOUT_S:.0f} s; run it by hand"
        ) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "Failed to parse" in line]
        raise ConfigError(f"{path}: Ansible cannot read this inventory: {' '.join(lines) or done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
