"""A teacher's scores in the student's ids, for losses of one vocabulary."""
