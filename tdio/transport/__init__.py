"""The only importers of redis and sockets; every foreign exception becomes one of ours here."""
