"""Top elements, extremes and scans."""
