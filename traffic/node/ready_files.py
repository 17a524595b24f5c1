"""Files that become ready together, and their handlers."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    import selectors

__all__ = ["handle_ready"]


def handle_ready(selector: selectors.BaseSelector, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
    """Call the handlers (`data`) of the files that became ready together.

    A handler may close another file of the list: a request to forget the tasks closes the sockets to their GPU and
    their storage. The event of a closed file is skipped. It would look like an error of that socket in the job's next
    placement.
    """
    registered = selector.get_map()
    for key, _ in ready:
        current = registered.get(key.fd)
        if current is not None and current.fileobj is key.fileobj:
            key.data()
