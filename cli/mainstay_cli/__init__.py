"""The command line: local mode, status and timeline, reports and their comparison."""
