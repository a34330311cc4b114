"""One router per audience: agents, people, probes."""
