"""Commands are data: words with placeholders, without a shell unless the user asks for one."""

from __future__ import annotations

import pytest

from faultbed.testbed.errors import UsageError
from faultbed.traffic.node.programs.placeholders import fill, names_in
from faultbed.traffic.programs.command_spec import check_progress, check_role_name, words_of

ROLES = ("server", "client")


def test_command_is_split_into_words():
    assert words_of("ib_write_bw -d {rnic} 'a b' {server}", ROLES, shell=False) == (
        "ib_write_bw",
        "-d",
        "{rnic}",
        "a b",
        "{server}",
    )


@pytest.mark.parametrize(
    ("command", "sign"),
    [
        ("a | b", "|"),
        ("a; b", ";"),
        ("a > f", ">"),
        ("a 2>&1", ">"),
        ("a && b", "&&"),
        ("a `b`", "`"),
        ("a $(b)", "$("),
        ("a $HOME", "$H"),
        ("a *.json", "*"),
        ("a ~/b", "~"),
    ],
)
def test_command_that_needs_a_shell_is_refused_with_the_sign(command, sign):
    with pytest.raises(UsageError) as error:
        words_of(command, ROLES, shell=False)
    assert str(error.value).startswith(f"{sign} needs a shell")
    assert words_of(command, ROLES, shell=True) == (command,)


def test_signs_in_quotes_are_text_for_the_program():
    assert words_of("sh -c 'a | b; $(c)'", ROLES, shell=False) == ("sh", "-c", "a | b; $(c)")


def test_list_of_words_is_taken_as_it_is():
    assert words_of(["a", "b | c", "{rank}"], ROLES, shell=False) == ("a", "b | c", "{rank}")


@pytest.mark.parametrize("command", ["a {rncc}", "a {storage}", ["a", "x{nope}y"]])
def test_unknown_placeholder_is_refused(command):
    with pytest.raises(UsageError, match=r"no placeholder \{(rncc|storage|nope)\}; .*is the text itself"):
        words_of(command, ROLES, shell=False)


@pytest.mark.parametrize("command", ["", "   ", "a 'b"])
def test_empty_or_unclosed_command_is_refused(command):
    with pytest.raises(UsageError, match=r"empty|close the quotes"):
        words_of(command, ROLES, shell=False)


def test_braces_that_are_no_placeholder_stay():
    assert names_in('{"a": 1} ${HOME} {{print}} {} {Rnic}') == ()
    assert fill(["awk {{print}} {rnic}", '{"a": 1}'], {"rnic": "rxe0"}) == ["awk {print} rxe0", '{"a": 1}']


def test_value_with_braces_is_not_filled_again():
    assert fill(["{a}"], {"a": "{b}", "b": "x"}) == ["{b}"]


@pytest.mark.parametrize("name", ["rnic", "Server", "", "a b", "1st", "x" * 33, "a/b"])
def test_role_that_cannot_be_a_placeholder_is_refused(name):
    with pytest.raises(UsageError):
        check_role_name(name)


def test_unknown_reader_is_refused_with_the_names():
    with pytest.raises(UsageError, match=r'no reader "perftests"; choose one of fio, nccl-tests, perftest'):
        check_progress("perftests")
