"""What a model will need and reach on a machine, before it is loaded: sizes, hits, time, fitting, formats."""
