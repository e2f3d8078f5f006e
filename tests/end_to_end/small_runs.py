"""The configuration that whole runs of the quickstart model share."""

QUICKSTART = "examples/quickstart/quickstart.yaml"
SMALL = [
    "rollout.prompts_per_step=8",
    "rollout.completions_per_prompt=4",
    "evaluation.sets.0.limit=32",
    "evaluation.sets.1.limit=32",
]
