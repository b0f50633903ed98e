"""GSM8K: grade-school word problems with one integer answer each."""
