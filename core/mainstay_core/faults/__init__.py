"""Describes what can be broken on purpose: points, files, and draws from a seed.

- ``points``: what an injected fault is, and where it fires
- ``fields``: reads single fields of a faults file
- ``flips``: reads a wrong bit
- ``files``: reads a faults file and names what is wrong in it
- ``draw``: draws faults for a job from a seed
"""
