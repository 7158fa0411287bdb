"""A run on one page: `report.html`, made from the files of the run directory alone."""
