"""The last messages of a dead kernel are found in its console log."""

import pytest

from faultbed.testbed.backends.soft.serial_console import panic

# Printed by a soft-lab guest, shortened: an emulated instruction had left garbage in EFLAGS.
DOUBLE_FAULT = """[  OK  ] Reached target multi-user.target\r
[  158.196403] traps: PANIC: double fault, error_code: 0x0\r
[  158.205275] Oops: double fault: 0000 [#1] PREEMPT SMP NOPTI\r
[  158.207700] RIP: 0010:kmem_cache_alloc_node_noprof+0x6e/0x310\r
[  158.210847] RIP: 0010:kmem_cache_alloc_node_noprof+0x6e/0x310\r
[  158.211116] Kernel panic - not syncing: Fatal exception in interrupt\r
[  158.215567] ---[ end Kernel panic - not syncing: Fatal exception in interrupt ]---\r
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            DOUBLE_FAULT,
            "Fatal exception in interrupt, double fault, error_code: 0x0, in kmem_cache_alloc_node_noprof",
        ),
        ("x" * 100_000 + "\n[    9.1] Kernel panic - not syncing: sysrq triggered crash\n", "sysrq triggered crash"),
        ("login: Kernel panic - not syncing: said a user\n", None),
        ("", None),
    ],
)
def test_panic_is_found_in_the_kernels_words(tmp_path, log, words):
    (tmp_path / "console.log").write_bytes(log.encode())
    assert panic(tmp_path / "console.log") == words


def test_panic_of_a_vm_that_never_ran_is_none(tmp_path):
    assert panic(tmp_path / "console.log") is None
