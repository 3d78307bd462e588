"""Two mechanisms that refattn does not have, as another package brings them; each is a folder to read."""
