"""Model families: what each needs beyond the stages that all of them share."""
