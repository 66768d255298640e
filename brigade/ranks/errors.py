"""The exception for a request that cannot be fulfilled."""


class UserError(Exception):
    """Raised if a request cannot be fulfilled. The message is one sentence for the user."""
