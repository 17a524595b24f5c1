"""Log files of a machine's daemons, as its watcher reads them."""
