from tdio.testing.pipes import PipeTests


class TestMemory(PipeTests):
    pass
