"""The command line: one thin file per command, imported when it is asked for. Each does what one Python call does."""
