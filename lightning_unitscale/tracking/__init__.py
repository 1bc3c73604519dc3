"""Scale tracking of captured graphs: probes, records, and graphs that are shown to people."""
