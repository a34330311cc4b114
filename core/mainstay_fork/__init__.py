"""Forks: a warm process makes children that share what it has imported.

- ``children``: forks a child that goes on in the same program, and reaps it
- ``forge``: forks, kills and reaps children as somebody asks over a socket

Nothing but the standard library is needed, as trainers run in the user's image.
"""
