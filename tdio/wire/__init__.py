"""Sans-I/O: names on the server, commands, reply framing, and operations as generators."""
