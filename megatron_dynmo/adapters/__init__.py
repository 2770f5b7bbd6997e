"""The only code that knows Megatron from the inside, one concern a file."""
