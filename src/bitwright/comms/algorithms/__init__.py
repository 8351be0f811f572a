"""One algorithm a file: how a collective moves data between ranks, as generators of transfers (`ALGORITHMS`)."""
