"""Analysis: attributions, example users, plots and the report."""
