"""Node programs that are forked from one process, which has imported their code before the lab's snapshot."""
