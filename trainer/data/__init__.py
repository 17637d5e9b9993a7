"""Problems from files and tasks: records with their locations, as rows of tokens for the trainer."""
