"""The work of the pipeline: one module, one plain function per stage."""
