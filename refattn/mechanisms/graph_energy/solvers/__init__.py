"""Other ways to take the steps: chosen lengths, equations for where a step ends, flows that stop, gradients at rest."""
