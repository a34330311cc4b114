"""Plays what surrounds the trainers of a simulated run: the api, pods and people.

- ``streams``: the job's stream at one replica of the api
- ``api``: one replica of the api
- ``api_client``: a supervisor's way to the api
- ``supervisor``: the shell of a pod's supervisor
- ``provider``: makes pods
- ``wishes``: suspensions, scalings and permissions that somebody asks for or gives
"""
