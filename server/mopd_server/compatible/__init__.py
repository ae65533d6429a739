"""Routes of other servers, for the teacher clients of other trainers."""
