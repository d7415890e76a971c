"""Tests of the whole service, once more on a simulated GPU: their modules are imported, their server is another one."""
