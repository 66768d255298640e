"""What is right: values with which checks compare what the ranks have."""
