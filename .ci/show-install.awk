# Makes pip's several hundred lines a few: a sign of life every 20 packages, the long silent step, every error.
/^Collecting / { if (++count % 20 == 0) { printf "  %d packages found\n", count; fflush() } }
/^Installing collected packages/ { printf "  unpacking %d packages, about a minute\n", count; fflush() }
/^ERROR|^error|No space left/ { print; fflush() }
