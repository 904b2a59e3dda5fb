"""Tests of `pipeloom.launch`; a package, because the processes that they start import parts of it."""
