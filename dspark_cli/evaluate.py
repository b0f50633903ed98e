"""`dspark eval`: what its commands are; each module is imported when it is used."""

COMMANDS = {
    "gsm8k": ("dspark_cli.eval_gsm8k:gsm8k", "Grade-school problems: accuracy beside speed."),
    "speed-bench": ("dspark_cli.eval_speed_bench:speed_bench", "Acceptance over SPEED-Bench."),
    "lossless": ("dspark_cli.eval_lossless:lossless", "Is drafted output the plain output?"),
}
