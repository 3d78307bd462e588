"""The mechanism as a layer, and the same token by token."""
