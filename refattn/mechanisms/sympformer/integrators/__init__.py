"""One file for each integrator but presymplectic Euler, and what several of them share."""
