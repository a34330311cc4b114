"""The supervisor of one pod: talks to the api, watches trainers, outlives them. No torch."""
